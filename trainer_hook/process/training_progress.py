"""Progress of training as its library knows it, for ``trainer.json``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Planned steps and loss; ``None``: unknown."""

    total_steps: int | None = None
    loss: float | None = None


def finite(value: Any) -> float | None:
    """Return a number that JSON can hold; ``None`` for anything else, also for a tensor, whose value may be on a GPU."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None
