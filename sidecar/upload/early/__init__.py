"""Upload of files while the trainer still writes their checkpoint."""
