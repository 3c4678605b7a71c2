"""How one library writes its part of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class StepWriter:
    """Every method is called on every rank at the same step. Any exception is logged, and training goes on."""

    names_folder = False
    """Whether the library itself names the folder of a step, by the step within its ``train()`` call."""

    def write(self, folder: Path) -> None:
        """Write this rank's files of the current step. The folder need not exist."""
        raise NotImplementedError

    def write_final(self, folder: Path) -> None:
        """Write this rank's files of the final model. The folder need not exist."""
        raise NotImplementedError

    def meta(self) -> Mapping[str, Any]:
        """Return what the marker of every checkpoint says under ``meta``."""
        return {}

    def expected_bytes(self) -> int:
        """Return the estimated size of the first checkpoint; 0: unknown."""
        return 0

    def overlapping_optimizer(self) -> Any:
        """Return the optimizer whose ``step()`` alone changes parameters, so that a snapshot may overlap with training.

        ``None``: other code may change them; the snapshot is complete before training goes on.
        """
        return None
