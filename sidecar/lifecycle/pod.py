"""This pod and its trainer: identity, attempt, and whether a training process is alive."""

from __future__ import annotations

import time
from typing import Protocol

from sidecar.core.format.attempts import Restart, of_pod
from sidecar.core.format.found_checkpoint import Identity
from sidecar.daemon.settings import Settings
from sidecar.lifecycle.termination import Termination
from sidecar.volume.volume import Volume

UNLEASED_QUIET_S = 2.0
"""Seconds after its last write for which a trainer without leases counts as alive (classic mode)."""


class UploadingPod(Protocol):
    """The pod and its trainer, as uploads need them. The simulation has one of its own."""

    def trainer_alive(self) -> bool:
        """Whether a training process is running."""
        ...

    def attempt(self) -> str:
        """Return the id of the trainer's present attempt."""
        ...


class Pod:
    """State of the real pod, read from the volume and from ``Termination``."""

    def __init__(self, settings: Settings, volume: Volume, termination: Termination) -> None:
        self._settings = settings
        self._volume = volume
        self._termination = termination

    def identity(self) -> Identity:
        """Return node and attempt for markers without them. Valid once ``Termination.begin`` has run."""
        settings = self._settings
        restart = Restart(*settings.restart) if settings.restart else None
        termination = self._termination
        attempt = of_pod(settings.pod, since_s=termination.pod_since_s, restart=restart)
        return Identity(settings.node, attempt, inherited=termination.inherited, foreign=termination.foreign)

    def attempt(self) -> str:
        """Return the id of the trainer's present attempt: the hook's, else the one of markers without an attempt."""
        return self._termination.trainer_attempt() or self.identity().attempt

    def trainer_alive(self) -> bool:
        """Whether a training process is running: it holds a lease or, in classic mode without the hook, it wrote just now."""
        if self._volume.held_leases():
            return True
        if self._settings.mode != "classic" or self._termination.trainer() is not None:
            return False
        try:
            newest_s = max(self._volume.unfinished().values(), default=0.0)
        except OSError:  # the volume is away
            return False
        return time.time() - newest_s < UNLEASED_QUIET_S
