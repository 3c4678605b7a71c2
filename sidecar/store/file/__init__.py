"""A folder as a store: a PVC or any mounted file system."""
