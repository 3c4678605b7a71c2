"""Saves of a step: when one is due, whether it fits on the volume, and the marker for the files that a library writes."""
