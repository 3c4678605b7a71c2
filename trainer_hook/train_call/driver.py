"""What one training library adds to the life of a ``train()`` call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_hook.asynchronous.background import Background
from trainer_hook.process.training_progress import TrainingProgress
from trainer_hook.resuming.resumer import Choice, Resumer
from trainer_hook.saving.step_saver import StepWriter


@dataclass(frozen=True, slots=True)
class ScriptCheckpoint:
    """The checkpoint that the script itself asks to resume from."""

    path: Any
    step: int
    """Step within this ``train()`` call; -1 where the checkpoint does not say."""


class Driver(StepWriter):
    """One library. Every method is called on every rank at the same point of training."""

    @property
    def global_step(self) -> int:
        """Finished steps of this call."""
        raise NotImplementedError

    def progress(self) -> TrainingProgress:
        """Return planned steps and loss of this call. Called every few seconds on one rank a node; must not wait for a GPU."""
        return TrainingProgress()

    def missing_files(self, files: Mapping[str, int], *, rank: int, world_size: int, saved_world_size: int | None) -> list[str]:
        """Return what a checkpoint lacks for one rank.

        ``files``: size in bytes by path. ``saved_world_size``: of the run that saved it; ``None``: unknown. If it is not
        ``world_size``, the random state is not needed.
        """
        raise NotImplementedError

    def check(self, folder: Path) -> None:
        """Read what this library reads of its own records in a complete checkpoint, or in ``final``.

        Raises:
            ContractError: A record is malformed, so that loading would end the training.
            OSError: It cannot be read.
        """

    def reads_all(self) -> bool:
        """Whether loading may read files that ranks of other nodes wrote."""
        return False

    def background(self) -> Background | None:
        """Return the writer of asynchronous saves; ``None``: saves block training. Collective."""
        return None

    def large_objects(self) -> Sequence[Any]:
        """Return the modules and optimizers that this rank saves, for the first allocation of snapshot memory."""
        return ()

    def script_checkpoint(self, choice: Choice | None, resumer: Resumer) -> ScriptCheckpoint | None:
        """Return the checkpoint that the script names; ``None``: it names none that can be used.

        ``choice``: what this system would resume from.
        """
        return None

    def interrupt(self) -> Mapping[str, Any]:
        """Prepare for a just-in-time save. Returns what its marker says under ``meta``."""
        return {}
