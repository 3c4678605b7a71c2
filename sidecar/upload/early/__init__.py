"""Early upload: files are sent while the trainer still writes their checkpoint."""
