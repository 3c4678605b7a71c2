"""Termination of the pod: notices, the deadline, and the trainer's state."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import structlog

from sidecar.core.lifecycle.phases import is_success_of_this_pod
from sidecar.core.lifecycle.volume_runs import VolumeRun
from sidecar.lifecycle import pod_record, volume_record
from sidecar.lifecycle.deadline import Deadline
from sidecar.volume.volume import Volume
from trainer_hook.contract import (
    EXIT_REPORT,
    TERMINATING,
    TRAINER_STATE,
    ContractError,
    Notice,
    TrainerState,
    encode_notice,
    epoch_seconds,
    parse_notice,
    parse_trainer_state,
    rfc3339,
)

log = structlog.get_logger()

LAST_REPORT = EXIT_REPORT.rpartition("/")[2]
"""File in the state directory: the trusted copy of the exit report for the next sidecar process."""


@dataclass(frozen=True, slots=True)
class TerminationNotice:
    """A termination notice. ``at_s``: epoch seconds; ``began_s``: monotonic seconds, because the wall clock may jump."""

    source: str
    at_s: float
    began_s: float


class LeasedPod(Protocol):
    """The pod and its trainer, as the lease of the prefix needs them. Tests have one of their own."""

    def present_attempt(self) -> str | None:
        """Return the attempt that this pod's trainer reported last; ``None``: none."""
        ...

    def age_s(self) -> float:
        """Return the seconds since the pod's first sidecar process began."""
        ...


class Termination:
    """Termination state. All sources of notices (signal, API, spot, hook) are equal; the earliest starts the clock."""

    def __init__(self, volume: Volume, *, grace_s: float) -> None:
        self._volume = volume
        self._grace_s = grace_s
        self.deadline: Final = Deadline(grace_s=grace_s)
        self._started_at_s = time.time()
        self.current_notice: TerminationNotice | None = None
        self.sigterms = 0
        self.fenced_by: str | None = None
        """Who has taken the prefix over, as a sentence; ``None``: nobody."""
        self._observers: list[Callable[[], object]] = []
        self._trainer_before: bytes | None = None
        """Content of ``trainer.json`` when this process started."""
        self._trainer_of_earlier_pod: bytes | None = None
        """Content of ``trainer.json`` that an earlier pod left."""
        self.pod_since_s = self._started_at_s
        """When this pod began to use the volume, epoch seconds."""
        self._pod_booted_s = pod_record.boot_clock_s()
        self.inherited: frozenset[str] = frozenset()
        """Versions of the finished checkpoints that an earlier pod left on the volume."""
        self.foreign: frozenset[str] = frozenset()
        """Versions of those that another run left there."""
        self._ended_in_order_at_s: float | None = None
        self._void: bytes | None = None
        """A void notice on the volume that could not be deleted."""
        self._absent_s = float("-inf")
        """When the volume was last seen without a notice (monotonic seconds)."""

    def observe(self, noticed: Callable[[], object]) -> None:
        """Call ``noticed`` at each new notice of any source, and at each SIGTERM."""
        self._observers.append(noticed)

    def begin(self, pod: str, *, is_unique: bool = True, run: VolumeRun | None = None) -> None:
        """Read the state that earlier processes of this pod and of earlier pods left on the volume.

        Args:
            pod: The pod's name.
            is_unique: The name is one pod's alone; a machine's is that of all its jobs.
            run: The pod's run; ``None``: all checkpoints on the volume are of it.
        """
        foreign: frozenset[str] = frozenset() if run is None else volume_record.begin(self._volume, run)
        record, is_first_life = pod_record.begin(self._volume, pod, now_s=self._started_at_s)
        report = self._volume.read_state(LAST_REPORT)
        self.clear_stale(is_first_life=is_first_life, ended_at_s=None if is_unique else ended_at_s(report))
        self._trainer_before = self._volume.read_small(TRAINER_STATE)
        self._trainer_of_earlier_pod = self._trainer_before if is_first_life else None
        self._ended_in_order_at_s = ended_in_order_at_s(report)
        self.pod_since_s, self._pod_booted_s, self.inherited = record.since_s, record.booted_s, record.inherited
        # What this pod wrote is its own, also where a full volume did not take the record of its run.
        self.foreign = foreign & self.inherited if is_unique else foreign

    def age_s(self) -> float:
        """Return the seconds since the pod's first sidecar process began. No setting of a clock changes it."""
        return max(0.0, pod_record.boot_clock_s() - self._pod_booted_s)

    def notice(
        self, source: str, *, at_s: float | None = None, ends_in_s: float | None = None, tell_trainer: bool = True
    ) -> bool:
        """Take a termination notice. Returns whether it is new; the observers were notified then.

        Args:
            source: Source of the notice.
            at_s: When it was given, epoch seconds; ``None``: now.
            ends_in_s: Seconds left, if the source knows them; ``None``: the grace period.
            tell_trainer: Whether to pass the notice on to the trainer.
        """
        is_news = self._take(source, at_s=at_s, ends_in_s=ends_in_s, tell_trainer=tell_trainer)
        if is_news:
            self._notify()
        return is_news

    def _notify(self) -> None:
        for noticed in self._observers:
            noticed()

    def _take(self, source: str, *, at_s: float | None, ends_in_s: float | None, tell_trainer: bool) -> bool:
        now_s = time.time()
        at_s = now_s if at_s is None else min(at_s, now_s)
        # Independent of the wall clock: a file that was missing at the last check is not older than that check.
        began_s = max(time.monotonic() - (now_s - at_s), self._absent_s)
        kill_at_s = began_s + self._grace_s if ends_in_s is None else time.monotonic() + ends_in_s
        before = self.current_notice
        if before is None or began_s < before.began_s:
            self.current_notice = TerminationNotice(source, at_s, began_s)
        self.deadline.set(kill_at_s)
        if tell_trainer and self._volume.read_small(TERMINATING) is None:
            self._tell_trainer(Notice(rfc3339(at_s), source))
        return before is None

    def _tell_trainer(self, notice: Notice) -> None:
        place = self._volume / TERMINATING
        try:
            try:
                place.publish(encode_notice(notice))
            except OSError:  # such as a full volume: an empty file needs no space, and is a notice, too
                place.publish(b"")
        except OSError as error:  # the trainer gets its own signal
            log.warning("notice_not_written", error=error.strerror)

    def expire(self) -> bool:
        """Withdraw a notice without SIGTERM within its time: the pod stays. Returns whether there was one."""
        if self.sigterms or self.fenced_by or not self.deadline.is_within(0.0):
            return False
        self._drop()
        return True

    def fenced(self, by: str) -> None:
        """Record that a later pod of the job has taken the prefix over. The trainer is told to stop; no SIGTERM need follow."""
        self.fenced_by = by
        # Also over an earlier notice: a trainer that started after that one does not believe it.
        self._tell_trainer(Notice(rfc3339(time.time()), "fenced"))
        self.notice("fenced", tell_trainer=False)

    def sigterm(self, *, tell_trainer: bool = True) -> None:
        """Record that the sidecar got SIGTERM."""
        self.sigterms += 1
        if self.sigterms == 1 and self.deadline.is_within(0.0):
            self._drop()  # an old notice must not shorten the time of this one
        self._take("sigterm", at_s=None, ends_in_s=None, tell_trainer=tell_trainer)
        self._notify()

    def _drop(self) -> None:
        self.current_notice = None
        self.deadline.clear()
        self._void = self._volume.read_small(TERMINATING)
        self._unlink_notice()

    def _unlink_notice(self) -> None:
        with contextlib.suppress(OSError):  # a missing or read-only volume: the clock decides
            (self._volume / TERMINATING).remove()

    def poll_notice(self) -> bool:
        """Check for the hook's ``terminating`` file. Returns whether it is a new notice."""
        raw = self._volume.read_small(TERMINATING)
        if raw is None:
            self._absent_s, self._void = time.monotonic(), None
        if raw is None or raw == self._void or self.current_notice is not None:
            return False
        notice = parse_notice(raw)
        return self.notice(notice.source or "sigterm", at_s=epoch_seconds(notice.at) if notice.at else None)

    def clear_stale(self, *, is_first_life: bool, ended_at_s: float | None = None) -> None:
        """Delete a notice that an earlier process or an earlier pod left: a starting container is not terminating.

        This pod's notice still counts until its time is over: the sidecar was restarted in the middle of a flush. A notice that
        the first process of a pod finds was given to the pod before it, whose grace period does not apply here. So was, outside
        Kubernetes, one from before ``ended_at_s`` (epoch seconds), when the process before this one had ended in order.
        """
        raw = self._volume.read_small(TERMINATING)
        if raw is None:
            return
        notice = parse_notice(raw)
        at_s = None if notice.at is None else epoch_seconds(notice.at)
        is_followed = at_s is not None and ended_at_s is not None and at_s <= ended_at_s
        if is_first_life or is_followed or at_s is None or at_s < self._started_at_s - self._grace_s:
            self._void = raw
            self._unlink_notice()

    def trainer(self) -> TrainerState | None:
        """Return the trainer's state that the hook reported last, or ``None`` without a hook."""
        raw = self._volume.read_small(TRAINER_STATE)
        try:
            return None if raw is None else parse_trainer_state(raw)
        except ContractError:
            return None

    def trainer_attempt(self) -> str | None:
        """Return the attempt that the hook reported last, or ``None`` without a hook."""
        trainer = self.trainer()
        return trainer.attempt if trainer else None

    def present_attempt(self) -> str | None:
        """Return the attempt that this pod's trainer reported last; ``None``: none, or that of an earlier pod."""
        raw = self._volume.read_small(TRAINER_STATE)
        return None if raw == self._trainer_of_earlier_pod else self.trainer_attempt()

    def trainer_succeeded(self) -> bool:
        """Whether the trainer of this pod has reported success."""
        trainer = self.trainer()
        return (
            trainer is not None
            and trainer.state == "succeeded"
            and is_success_of_this_pod(
                updated_at_s=_epoch_s(trainer.updated_at),
                changed=self._volume.read_small(TRAINER_STATE) != self._trainer_before,
                pod_since_s=self.pod_since_s,
                ended_in_order_at_s=self._ended_in_order_at_s,
            )
        )


def ended_in_order_at_s(raw: bytes | None) -> float | None:
    """Return when the life that wrote an exit report ended with code 0, epoch seconds; ``None``: it did not, or unknown."""
    return ended_at_s(raw) if _fields(raw).get("exit_code") == 0 else None


def ended_at_s(raw: bytes | None) -> float | None:
    """Return when the life that wrote an exit report ended, epoch seconds; ``None``: unknown."""
    return _epoch_s(_fields(raw).get("written_at"))


def _fields(raw: bytes | None) -> dict[str, Any]:
    try:
        fields = json.loads(raw or b"{}")
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _epoch_s(text: Any) -> float | None:
    try:
        return epoch_seconds(text) if isinstance(text, str) else None
    except ContractError:
        return None
