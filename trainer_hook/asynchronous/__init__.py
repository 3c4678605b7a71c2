"""Asynchronous saves: a snapshot in host memory, which a process of its own writes. Knows no trainer."""
