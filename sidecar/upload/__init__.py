"""Uploads of checkpoints: newest first, all work items in one order, committed when complete."""
