"""When a periodic save is due. Decisions only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """``strategy`` is ``steps``, ``epoch``, ``minutes`` or ``no``."""

    strategy: str
    every_steps: int
    every_s: float

    def due_at_step(self, step: int) -> bool:
        """Whether a step is one to save at; the same answer on every rank."""
        return self.strategy == "steps" and step > 0 and step % self.every_steps == 0

    def due_at_time(self, *, since_save_s: float) -> bool:
        """Whether enough time has passed; ranks differ in this and have to agree."""
        return self.strategy == "minutes" and since_save_s >= self.every_s

    def due_at_epoch_end(self) -> bool:
        """Whether each epoch ends with a save."""
        return self.strategy == "epoch"


def surplus(
    saves: Mapping[int, str | None], *, limit: int | None, step: int, attempt: str | None, resumed_step: int | None
) -> list[int]:
    """Return the steps to delete from the volume so that ``limit`` stay, never the one that was just saved.

    Abandoned steps go first: training went back behind them, or another attempt saved them after the step that this one
    resumed from. Of the others the newest stay.

    Args:
        saves: The attempt that saved each finished step; ``None``: unknown.
        limit: ``CKPT_SAVE_TOTAL_LIMIT``; ``None`` keeps all.
        step: The step that was just saved.
        attempt: This attempt.
        resumed_step: The step that this attempt resumed from; ``None``: none.
    """
    if limit is None:
        return []

    def value(saved: int) -> tuple[bool, int]:
        is_own = saves[saved] in (attempt, None) or (resumed_step is not None and saved <= resumed_step)
        return saved <= step and is_own, saved

    return sorted(saves, key=value)[: max(0, len(saves) - max(1, limit))]
