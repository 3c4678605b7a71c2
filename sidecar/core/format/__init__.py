"""Documents, names and encodings (FORMAT.md), with their validation."""
