"""Whether the shared volume may soon have no room for a checkpoint."""

from __future__ import annotations

LEAST_CHECKPOINTS = 2
"""Checkpoints that must fit into the free space: one that is being written, and one more until the first one is durable."""
LEAST_FREE_BYTES = 10**9
"""Free space that is enough while the size of a checkpoint is not known."""
LEAST_FREE_SHARE = 0.05


def is_nearly_full(free_bytes: int, total_bytes: int, *, checkpoint_bytes: int | None) -> bool:
    """Return whether the free space is too small for the next checkpoints.

    A share alone says little: 5 % of a node's disk is room for a thousand checkpoints of one run and for none of another.

    ``checkpoint_bytes``: size of the newest checkpoint; ``None``: not known.
    """
    if checkpoint_bytes is not None:
        return free_bytes < LEAST_CHECKPOINTS * checkpoint_bytes
    return free_bytes < min(LEAST_FREE_BYTES, LEAST_FREE_SHARE * total_bytes)
