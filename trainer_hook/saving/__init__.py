"""Saving a step: when, whether it fits on the volume, and the marker for the files that a library writes."""
