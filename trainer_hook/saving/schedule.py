"""When a periodic save is due. Decisions only."""

from __future__ import annotations

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


def surplus(steps: list[int], *, limit: int | None) -> list[int]:
    """Return the steps to delete from the volume, oldest first, so that ``limit`` newest stay. ``None`` keeps all."""
    return [] if limit is None else sorted(steps)[: max(0, len(steps) - max(1, limit))]
