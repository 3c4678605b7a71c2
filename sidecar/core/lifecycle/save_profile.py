"""Profile of a save: its size, and the time that the trainer needs to write it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sidecar.core.format.found_checkpoint import Finished
from trainer_hook.contract import FINAL

LONGEST_S = 900.0
"""Seconds before the marker from which a file counts as linked, or copied with its time, not as written by this save."""
MARKER_RESOLUTION_S = 0.001
"""The marker's time has milliseconds, cut off: a file written just before the marker may look that much younger."""


@dataclass(frozen=True, slots=True)
class SaveProfile:
    """Size and duration of one save."""

    size_bytes: int
    took_s: float | None
    """Seconds from the first closed file to the marker; ``None``: the files' times do not show it."""
    step_seconds: float | None
    """Duration of an optimizer step as the hook measured it; ``None``: unknown."""
    ranks: int


def save_profile(checkpoint: Finished) -> SaveProfile:
    """Return the profile of a finished checkpoint."""
    ages_s = [checkpoint.created_at_s - file.mtime_ns / 1e9 for file in checkpoint.files]
    took_s = max((max(age_s, 0.0) for age_s in ages_s if -MARKER_RESOLUTION_S <= age_s <= LONGEST_S), default=None)
    return SaveProfile(checkpoint.size_bytes, took_s, checkpoint.step_seconds, checkpoint.world_size or 1)


def usual_profile(finished: Iterable[Finished]) -> SaveProfile | None:
    """Return the expected profile of the next save: that of the newest resumable checkpoint; ``None``: there is none."""
    resumable = [c for c in finished if c.name != FINAL and c.restored_from is None]
    return save_profile(max(resumable, key=lambda c: (c.step or 0, c.created_at_s))) if resumable else None
