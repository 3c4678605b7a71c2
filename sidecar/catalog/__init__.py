"""Checkpoints on the volume: found by the scanner, each with one state, each change an event."""
