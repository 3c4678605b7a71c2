"""What saves are like: how large, and how long the trainer writes at one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sidecar.core.local import Finished
from trainer_hook.contract import FINAL

LONGEST_S = 900.0
"""A file this much older than the marker was not written by this save: it was linked or copied with its time."""


@dataclass(frozen=True, slots=True)
class Save:
    """One save."""

    size_bytes: int
    took_s: float | None
    """From the first file that was closed to the marker; ``None`` where the times of the files do not tell."""
    step_seconds: float | None
    """Time of an optimizer step, as the hook measured it."""
    ranks: int


def save_of(checkpoint: Finished) -> Save:
    """Return what writing a checkpoint was like."""
    ages_s = [checkpoint.created_at_s - file.mtime_ns / 1e9 for file in checkpoint.files]
    took_s = max((age_s for age_s in ages_s if 0 <= age_s <= LONGEST_S), default=None)
    return Save(checkpoint.size_bytes, took_s, checkpoint.step_seconds, checkpoint.world_size or 1)


def usual_save(finished: Iterable[Finished]) -> Save | None:
    """Return what the next save will be like: as the newest that a run can be resumed from; ``None`` before the first."""
    resumable = [c for c in finished if c.name != FINAL and c.restored_from is None]
    return save_of(max(resumable, key=lambda c: (c.step or 0, c.created_at_s))) if resumable else None
