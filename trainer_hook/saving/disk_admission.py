"""Whether a checkpoint will fit on the volume. One that does not must not fill it: others write there, too."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from trainer_hook.process.client import Client
from trainer_hook.process.log import say, warn

SPARE = 1.05
"""A checkpoint is expected to grow by no more than this."""
PATIENCE_S = 5.0
"""Longest wait for the sidecar to delete what is durable."""


class Room:
    """Asks the file system, and the sidecar only where that has not enough."""

    def __init__(self, volume: Path, client: Client) -> None:
        self._volume = volume
        self._client = client
        self._warned = False

    def fits(self, expected_bytes: int) -> bool:
        """Whether a save is to be tried. Says once that it is not, until one fits again.

        Raises:
            OSError: The volume cannot be asked.
        """
        wanted_bytes = int(expected_bytes * SPARE)
        if self.make(wanted_bytes):
            self._warned = False
            return True
        if not self._warned:
            self._warned = True
            free_bytes = _free_bytes(self._volume)
            warn(
                f"saves are skipped: {self._volume} has {free_bytes:,} bytes free, a checkpoint takes about {expected_bytes:,};"
                " nothing on it is durable and may go. Make the volume larger, or set CKPT_SAVE_TOTAL_LIMIT"
            )
        return False

    def make(self, wanted_bytes: int) -> bool:
        """Have the sidecar drop durable checkpoints if there is not enough room. Returns whether there is now.

        Raises:
            OSError: The volume cannot be asked.
        """
        if _free_bytes(self._volume) >= wanted_bytes:
            return True
        with contextlib.suppress(OSError):  # no sidecar, or one that does not know the question: nothing may go
            gone = self._client.make_room(wanted_bytes, timeout_s=PATIENCE_S)
            if gone:
                say(f"made room on the volume: {', '.join(gone)} left it, durable in the store")
        return _free_bytes(self._volume) >= wanted_bytes


def _free_bytes(volume: Path) -> int:
    space = os.statvfs(volume)
    return space.f_bavail * space.f_frsize


def state_bytes(trainer: Any) -> int:
    """Return about how much a checkpoint of a Trainer takes on this node, before any was written: weights and optimizer.

    What DeepSpeed holds is not seen, nor a model or an optimizer of another kind: then it is too little, and the first save
    is tried.
    """
    try:
        return _state_bytes(trainer.model, trainer.optimizer)
    except Exception:
        return 0


def _state_bytes(model: Any, optimizer: Any) -> int:
    weights = list(model.parameters()) + list(model.buffers())
    if hasattr(model, "peft_config"):  # only the adapter is saved
        weights = [tensor for tensor in weights if tensor.requires_grad]
    states = getattr(optimizer, "state", None) or {}
    moments = [value for state in states.values() for value in state.values() if hasattr(value, "element_size")]
    return sum(_own_bytes(tensor) for tensor in [*weights, *moments])


def _own_bytes(tensor: Any) -> int:
    part = getattr(tensor, "_local_tensor", tensor)  # of a sharded one, what this rank holds
    return int(part.numel() * part.element_size())
