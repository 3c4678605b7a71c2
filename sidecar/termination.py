"""Knows whether the pod is going, since when and until when, and whether the trainer still lives."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass, replace
from typing import Any

import structlog

from sidecar.core.lifecycle import is_success_of_this_pod, margin_s
from sidecar.volume.files import publish
from sidecar.volume.volume import Volume
from trainer_hook.contract import (
    EXIT_REPORT,
    SYSTEM_DIR,
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

POD = f"{SYSTEM_DIR}/pod.json"
"""Which pod used the volume last, and since when."""


@dataclass(frozen=True, slots=True)
class Going:
    """The first notice. ``at_s`` is epoch, the others are monotonic: the wall clock may jump."""

    source: str
    at_s: float
    began_s: float
    until_s: float
    """When the time is over: of several notices the one that ends first counts."""


class Termination:
    """Gathers every notice; the earliest one starts the clock."""

    def __init__(self, volume: Volume, *, grace_s: float) -> None:
        self._volume = volume
        self._grace_s = grace_s
        self._started_at_s = time.time()
        self.going: Going | None = None
        self.sigterms = 0
        self._trainer_before: bytes | None = None
        """What ``trainer.json`` said when this life began."""
        self.pod_since_s = self._started_at_s
        """Since when this pod uses the volume, epoch."""
        self._ended_in_order_at_s: float | None = None
        self._void: bytes | None = None
        """A notice on the volume that no longer counts, where it could not be removed."""
        self._absent_s = float("-inf")
        """When no notice was on the volume, last time somebody looked (monotonic)."""

    def begin(self, pod: str) -> None:
        """Sort what earlier lives left on the volume: of this pod, and of others before it."""
        self.clear_stale()
        self._trainer_before = self._volume.read_small(TRAINER_STATE)
        self._ended_in_order_at_s = _ended_in_order_at_s(self._volume.read_small(EXIT_REPORT))
        since_s = _pod_since_s(self._volume.read_small(POD), pod)
        if since_s is not None:
            self.pod_since_s = since_s
            return
        try:
            publish(self._volume.root / POD, json.dumps({"pod": pod, "since": rfc3339(self._started_at_s)}).encode())
        except OSError as error:
            log.warning("pod_not_written", path=POD, error=error.strerror)

    def notice(
        self, source: str, *, at_s: float | None = None, ends_in_s: float | None = None, tell_trainer: bool = True
    ) -> bool:
        """The pod is going. Returns whether that is news.

        Args:
            source: Who says so.
            at_s: Since when, in epoch seconds; ``None``: now.
            ends_in_s: How long there is, where that is known better than by the grace period.
            tell_trainer: Whether the trainer must hear of it, too.
        """
        now_s = time.time()
        at_s = now_s if at_s is None else min(at_s, now_s)
        # Whatever the wall clock did since, a file that was not there at the last look is not older than that look.
        began_s = max(time.monotonic() - (now_s - at_s), self._absent_s)
        until_s = began_s + self._grace_s if ends_in_s is None else time.monotonic() + ends_in_s
        before = self.going
        if before is None:
            self.going = Going(source, at_s, began_s, until_s)
        else:
            first = before if before.began_s <= began_s else Going(source, at_s, began_s, until_s)
            self.going = replace(first, until_s=min(before.until_s, until_s))
        if tell_trainer and self._volume.read_small(TERMINATING) is None:
            try:
                publish(self._volume.root / TERMINATING, encode_notice(Notice(rfc3339(at_s), source)))
            except OSError as error:  # a full disk: the trainer has its own signal
                log.warning("notice_not_written", error=error.strerror)
        return before is None

    def expire(self) -> bool:
        """Drop a notice that no SIGTERM followed in its time: the pod stays. Returns whether there was one."""
        if self.sigterms or not self._is_overdue():
            return False
        self._drop()
        return True

    def sigterm(self, *, tell_trainer: bool = True) -> None:
        """The sidecar itself was told to end."""
        self.sigterms += 1
        if self.sigterms == 1 and self._is_overdue():
            self._drop()  # an old notice must not have used up this one's time
        self.notice("sigterm", tell_trainer=tell_trainer)

    def _is_overdue(self) -> bool:
        left_s = self.left_s()
        return left_s is not None and left_s <= 0

    def _drop(self) -> None:
        self.going = None
        self._void = self._volume.read_small(TERMINATING)
        self._unlink_notice()

    def _unlink_notice(self) -> None:
        with contextlib.suppress(OSError):  # a volume that is away or read-only: the clock is what counts
            (self._volume.root / TERMINATING).unlink(missing_ok=True)

    def look(self) -> bool:
        """Take notice of the hook's ``terminating`` file. Returns whether it is news."""
        raw = self._volume.read_small(TERMINATING)
        if raw is None:
            self._absent_s, self._void = time.monotonic(), None
        if raw is None or raw == self._void or self.going is not None:
            return False
        notice = parse_notice(raw)
        return self.notice(notice.source or "sigterm", at_s=epoch_seconds(notice.at) if notice.at else None)

    def clear_stale(self) -> None:
        """Remove a notice that an earlier life of this pod left: a container that starts is not going.

        One whose time is not over counts: the sidecar was started again in the middle of a flush.
        """
        raw = self._volume.read_small(TERMINATING)
        if raw is None:
            return
        notice = parse_notice(raw)
        if notice.at is None or epoch_seconds(notice.at) < self._started_at_s - self._grace_s:
            self._void = raw
            self._unlink_notice()

    def deadline_s(self) -> float | None:
        """Return the monotonic instant by which everything must be done, or ``None`` while nobody gave notice."""
        return None if self.going is None else self.going.until_s - margin_s(self._grace_s)

    def left_s(self) -> float | None:
        """Return the seconds until the deadline."""
        deadline_s = self.deadline_s()
        return None if deadline_s is None else deadline_s - time.monotonic()

    def trainer(self) -> TrainerState | None:
        """Return what the hook last said of the trainer, or ``None`` where there is no hook."""
        raw = self._volume.read_small(TRAINER_STATE)
        try:
            return None if raw is None else parse_trainer_state(raw)
        except ContractError:
            return None

    def trainer_succeeded(self) -> bool:
        """Whether the trainer of this pod said that it succeeded."""
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


def _pod_since_s(raw: bytes | None, pod: str) -> float | None:
    known = _fields(raw)
    return _epoch_s(known.get("since")) if known.get("pod") == pod else None


def _ended_in_order_at_s(raw: bytes | None) -> float | None:
    report = _fields(raw)
    return _epoch_s(report.get("written_at")) if report.get("exit_code") == 0 else None


def _fields(raw: bytes | None) -> dict[str, Any]:
    try:
        fields = json.loads(raw or b"{}")
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _epoch_s(text: Any) -> float | None:
    try:
        return epoch_seconds(text) if isinstance(text, str) else None
    except ContractError:
        return None
