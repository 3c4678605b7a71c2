"""Termination of the pod: notices of all sources, and the deadline that they set."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from sidecar.lifecycle.deadline import Deadline
from sidecar.volume.volume import Volume
from trainer_hook.contract import TERMINATING, Notice, encode_notice, epoch_seconds, parse_notice, rfc3339

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class TerminationNotice:
    """A termination notice. ``at_s``: epoch seconds; ``began_s``: monotonic seconds, because the wall clock may jump."""

    source: str
    at_s: float
    began_s: float


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
        """Sentence that names the later pod of the job that holds the prefix; ``None``: this pod is not fenced."""
        self._observers: list[Callable[[], object]] = []
        self._void: bytes | None = None
        """Content of a stale or withdrawn notice that may still be on the volume: it does not count."""
        self._taken: bytes | None = None
        """Content of the notice on the volume that counts already, or that this process wrote."""
        self._absent_s = float("-inf")
        """When the volume was last seen without a notice (monotonic seconds)."""

    def observe(self, noticed: Callable[[], object]) -> None:
        """Call ``noticed`` at each new notice of any source, and at each SIGTERM."""
        self._observers.append(noticed)

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
                place.publish(written := encode_notice(notice))
            except OSError:  # such as a full volume: an empty file needs no space, and is a valid notice
                place.publish(written := b"")
            self._taken = written
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
        # An earlier notice on the volume is replaced: a trainer that started after it ignores it.
        self._tell_trainer(Notice(rfc3339(time.time()), "fenced"))
        self.notice("fenced", tell_trainer=False)

    def sigterm(self, *, tell_trainer: bool = True) -> None:
        """Record that the sidecar got SIGTERM."""
        self.sigterms += 1
        if self.sigterms == 1 and self.deadline.is_within(0.0):
            self._drop()  # an expired notice must not shorten the time of this one
        self.poll_notice()  # a notice on the volume that was not polled yet is earlier: its time counts
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
        """Check for the hook's ``terminating`` file, also after another notice. Returns whether it is the first notice."""
        try:
            raw = self._volume.read_small(TERMINATING, surely=True)
        except OSError:  # neither is it missing nor is it new
            return False
        if raw is None:
            self._absent_s, self._void, self._taken = time.monotonic(), None, None
        if raw is None or raw in (self._void, self._taken):
            return False
        self._taken, notice = raw, parse_notice(raw)
        return self.notice(notice.source or "sigterm", at_s=epoch_seconds(notice.at) if notice.at else None)

    def clear_stale(self, raw: bytes, *, is_first_life: bool, ended_at_s: float | None = None) -> None:
        """Delete a stale notice of an earlier process or pod: a starting container is not terminating.

        A notice is stale if this is the first process of its pod, because it was given to an earlier pod; if its grace period
        is over; or if the process before this one wrote its exit report after it, because no container starts in a terminating
        pod. Otherwise it counts: the sidecar was restarted in the middle of a flush. A notice of a fencing from before that
        report stays, because it tells the trainer to stop, but it does not count here: this process asks the store whether a
        later pod holds the prefix.

        Args:
            raw: Content of the notice on the volume.
            is_first_life: This is the first sidecar process of the pod.
            ended_at_s: When the process before this one wrote its exit report, epoch seconds; ``None``: it was killed.
        """
        notice = parse_notice(raw)
        at_s = None if notice.at is None else epoch_seconds(notice.at)
        has_ended = at_s is not None and ended_at_s is not None and at_s <= ended_at_s
        was_followed = has_ended and notice.source != "fenced"
        if is_first_life or was_followed or at_s is None or at_s < self._started_at_s - self._grace_s:
            self._void = raw
            if self._volume.read_small(TERMINATING) == raw:  # not one that has come since
                self._unlink_notice()
        elif has_ended:  # of a fencing
            self._taken = raw
