"""Training scripts, and the demo that runs one of them. None of it is in the wheel."""
