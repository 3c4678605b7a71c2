"""What a run continues from."""
