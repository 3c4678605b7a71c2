"""What transfers cost, beside the tools that people use for them; see ``transfer`` and ``neighbour``."""
