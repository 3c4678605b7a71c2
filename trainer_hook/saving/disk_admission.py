"""Whether a checkpoint fits on the volume. One that does not is not begun: the sidecar and other ranks write there, too."""

from __future__ import annotations

import contextlib
from pathlib import Path

from trainer_hook.process.client import Client
from trainer_hook.process.log import info, warn
from trainer_hook.volume.checkpoint_folder import finished_on
from trainer_hook.volume.space import free_bytes, next_step, size_text

GROWTH_FACTOR = 1.05
"""Most by which a checkpoint is larger than the one before."""
MAKE_ROOM_TIMEOUT_S = 5.0
"""Longest wait for the sidecar to delete durable checkpoints."""


class DiskAdmission:
    """Asks the file system for free space, and the sidecar where there is too little."""

    def __init__(self, volume: Path, client: Client) -> None:
        self._volume = volume
        self._client = client
        self.refusal: str | None = None
        """Why the latest checkpoint did not fit; ``None``: it did. Logged at the first of several."""

    def fits(self, expected_bytes: int) -> bool:
        """Whether a checkpoint of this size fits. Warns at the first of several that do not.

        Raises ``OSError``: the free space of the volume is unknown.
        """
        if self.make_room(expected_bytes):
            self.refusal = None
            return True
        if self.refusal is None:
            self.refusal = (
                f"saves are skipped: {self._volume} has {size_text(free_bytes(self._volume))} free, a checkpoint takes about "
                f"{size_text(expected_bytes)}, and nothing on it is durable and may go: "
                f"{next_step(has_checkpoints=bool(finished_on(self._volume)))}"
            )
            warn(self.refusal)
        return False

    def make_room(self, expected_bytes: int) -> bool:
        """Have the sidecar delete durable checkpoints if there is too little space. Returns whether there is enough now.

        Raises ``OSError``: the free space of the volume is unknown.
        """
        wanted_bytes = int(expected_bytes * GROWTH_FACTOR)
        if free_bytes(self._volume) >= wanted_bytes:
            return True
        with contextlib.suppress(OSError):  # no sidecar, or one without this request: nothing is deleted
            gone = self._client.make_room(wanted_bytes, timeout_s=MAKE_ROOM_TIMEOUT_S)
            if gone:
                info(f"freed space on the volume: {', '.join(gone)} left it")
        return free_bytes(self._volume) >= wanted_bytes
