"""Object stores behind one protocol: S3 and a folder. Knows keys and bytes, no checkpoints."""
