"""Training loops of the script: the driver for named objects, and the position in the data for an exact resume."""
