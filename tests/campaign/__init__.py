"""Runs of real sidecars through faults that a seed chooses, and a reader of its own that checks what became of them."""
