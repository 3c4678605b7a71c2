"""Loops that a later process continues at the same batch."""
