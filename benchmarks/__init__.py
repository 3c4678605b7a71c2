"""Cost of transfers, beside other tools; see ``transfer`` and ``neighbour``."""
