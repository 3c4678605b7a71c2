"""Saves that do not stop training: a snapshot in host memory, which a process of its own writes. Knows no trainer."""
