"""Deletion of checkpoints that are not kept, on the volume and in the store."""
