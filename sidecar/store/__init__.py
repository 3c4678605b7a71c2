"""Object stores behind one protocol: S3, a folder."""
