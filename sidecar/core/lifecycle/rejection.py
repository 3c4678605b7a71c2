"""Rejected checkpoints that are a loss, because no durable checkpoint is newer."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class Marked(NamedTuple):
    """A directory with a marker."""

    name: str
    step: int | None
    """The step that a run can resume from; ``None`` for ``final``."""
    at_s: float
    """Time of its marker, epoch seconds."""
    is_restored: bool = False
    """It was downloaded, so its time does not tell when it was trained."""


def newest_rejected(rejected: Collection[Marked], durable: Collection[Marked], *, newest_durable_step: int | None) -> list[str]:
    """Return the names of rejected checkpoints that are newer than every durable one.

    A durable checkpoint is newer than a rejected one of the same or a lower step. It is also newer than one with an older
    marker, whatever the steps: for example a ``final`` or a higher step that an earlier run left on the volume.

    Args:
        rejected: Rejected directories with a marker.
        durable: Durable checkpoints on this volume.
        newest_durable_step: Newest step known to be in the store, also without a directory; ``None``: none.
    """
    finished_s = max((d.at_s for d in durable if not d.is_restored), default=float("-inf"))
    return [
        r.name
        for r in rejected
        if r.at_s >= finished_s and (r.step is None or newest_durable_step is None or r.step > newest_durable_step)
    ]
