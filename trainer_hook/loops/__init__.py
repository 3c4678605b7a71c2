"""Loops that a later process continues at the same batch: place in the data, random state, and the files of the objects."""
