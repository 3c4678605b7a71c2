"""This pod and its trainer: identity, age, attempt, whether a training process is alive, and how it ended."""

from __future__ import annotations

import json
import time
from typing import Any, Protocol

from sidecar.core.format.attempts import Restart, of_pod, seconds
from sidecar.core.format.found_checkpoint import Identity
from sidecar.core.lifecycle.phases import is_success_of_this_pod
from sidecar.core.lifecycle.volume_runs import VolumeRun
from sidecar.daemon.settings import Settings
from sidecar.lifecycle import pod_record, volume_record
from sidecar.lifecycle.termination import Termination
from sidecar.volume.volume import Volume
from trainer_hook.contract import (
    EXIT_REPORT,
    TERMINATING,
    TRAINER_STATE,
    ContractError,
    Node,
    TrainerState,
    parse_trainer_state,
)

LAST_REPORT = EXIT_REPORT.rpartition("/")[2]
"""File in the state directory: the trusted copy of the exit report for the next sidecar process."""
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


class LeasedPod(Protocol):
    """The pod and its trainer, as the lease of the prefix needs them. Tests have one of their own."""

    def present_attempt(self) -> str | None:
        """Return the attempt that this pod's trainer reported last; ``None``: none."""
        ...

    def age_s(self) -> float:
        """Return the seconds since the pod's first sidecar process began."""
        ...


class Pod:
    """The real pod: what its settings say, and what it, its trainer and earlier pods left on the volume."""

    def __init__(self, settings: Settings, volume: Volume, termination: Termination) -> None:
        """Start as if the volume were new; ``begin`` reads it."""
        self._settings = settings
        self._volume = volume
        self._termination = termination
        self.since_s = time.time()
        """When this pod began to use the volume, epoch seconds."""
        self._booted_s = pod_record.boot_clock_s()
        self._inherited: frozenset[str] = frozenset()
        """Versions of the finished checkpoints that an earlier pod left on the volume."""
        self._foreign: frozenset[str] = frozenset()
        """Versions of those that another run left there."""
        self._nodes: dict[str, Node | None] = {}
        """Node of those that another node of a job left there, by version."""
        self._trainer_before: bytes | None = None
        """Content of ``trainer.json`` when this process started."""
        self._trainer_of_earlier_pod: bytes | None = None
        """Content of ``trainer.json`` that an earlier pod left."""
        self._ended_in_order_at_s: float | None = None

    def begin(self, run: VolumeRun | None = None) -> None:
        """Read the state that earlier processes of this pod and of earlier pods left on the volume.

        ``run``: the pod's; ``None``: all checkpoints on the volume are of it.

        Raises:
            OSError: The volume cannot be read now. It may be called again.
        """
        settings, volume = self._settings, self._volume
        report, notice = volume.read_state(LAST_REPORT, surely=True), volume.read_small(TERMINATING, surely=True)
        self._trainer_before = volume.read_small(TRAINER_STATE, surely=True)
        foreign: frozenset[str] = frozenset() if run is None else volume_record.begin(volume, run)
        nodes = {} if run is None else volume_record.begin_node(volume, settings.node)
        # Last of those that may fail: with its record on the volume, another call would not be the pod's first.
        record, is_first_life = pod_record.begin(volume, settings.pod, now_s=self.since_s)
        ended_s, in_order = end_of(report)
        if notice is not None:
            self._termination.clear_stale(notice, is_first_life=is_first_life, ended_at_s=ended_s)
        self._trainer_of_earlier_pod = self._trainer_before if is_first_life else None
        self._ended_in_order_at_s = ended_s if in_order else None
        self.since_s, self._booted_s, self._inherited = record.since_s, record.booted_s, record.inherited
        # What this pod wrote is its own, also where a full volume did not take the records.
        self._foreign = foreign & self._inherited if settings.pod_is_unique else foreign
        are_all = not settings.pod_is_unique
        self._nodes = {version: node for version, node in nodes.items() if are_all or version in self._inherited}

    def identity(self) -> Identity:
        """Return node and attempt for markers without them. Valid once ``begin`` has run."""
        settings = self._settings
        restart = Restart(*settings.restart) if settings.restart else None
        attempt = of_pod(settings.pod, since_s=self.since_s, restart=restart)
        return Identity(settings.node, attempt, inherited=self._inherited, foreign=self._foreign, nodes=self._nodes)

    def age_s(self) -> float:
        """Return the seconds since the pod's first sidecar process began. No setting of a clock changes it."""
        return max(0.0, pod_record.boot_clock_s() - self._booted_s)

    def trainer(self) -> TrainerState | None:
        """Return the trainer's state that the hook reported last, or ``None`` without a hook."""
        raw = self._volume.read_small(TRAINER_STATE)
        try:
            return None if raw is None else parse_trainer_state(raw)
        except ContractError:
            return None

    def attempt(self) -> str:
        """Return the id of the trainer's present attempt: the hook's, else the one of markers without an attempt."""
        trainer = self.trainer()
        return (trainer.attempt if trainer else None) or self.identity().attempt

    def present_attempt(self) -> str | None:
        """Return the attempt that this pod's trainer reported last; ``None``: none, or that of an earlier pod."""
        trainer = self.present_trainer()
        return trainer.attempt if trainer else None

    def present_trainer(self) -> TrainerState | None:
        """Return what this pod's trainer reported last; ``None``: nothing, or an earlier pod's did."""
        raw, trainer = self._volume.read_small(TRAINER_STATE), self.trainer()
        return None if raw == self._trainer_of_earlier_pod else trainer

    def trainer_succeeded(self) -> bool:
        """Whether the trainer of this pod has reported success."""
        trainer = self.trainer()
        if trainer is None or trainer.state != "succeeded":
            return False
        return is_success_of_this_pod(
            updated_at_s=_epoch_s(trainer.updated_at),
            changed=self._volume.read_small(TRAINER_STATE) != self._trainer_before,
            pod_since_s=self.since_s,
            ended_in_order_at_s=self._ended_in_order_at_s,
        )

    def trainer_alive(self) -> bool:
        """Whether a training process is running: it holds a lease or, in classic mode without the hook, it wrote just now."""
        if self._volume.held_leases():
            return True
        if self._settings.mode != "classic" or self.trainer() is not None:
            return False
        try:
            newest_s = max(self._volume.unfinished().values(), default=0.0)
        except OSError:  # the volume is away
            return False
        return time.time() - newest_s < UNLEASED_QUIET_S


def end_of(report: bytes | None) -> tuple[float | None, bool]:
    """Return when the life that wrote an exit report ended, epoch seconds (``None``: unknown), and whether with code 0."""
    try:
        fields = json.loads(report or b"{}")
    except (ValueError, RecursionError):
        fields = None
    return (_epoch_s(fields.get("written_at")), fields.get("exit_code") == 0) if isinstance(fields, dict) else (None, False)


def _epoch_s(text: Any) -> float | None:
    return seconds(text) if isinstance(text, str) else None
