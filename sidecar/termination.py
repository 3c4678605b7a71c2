"""Knows whether the pod is going, since when and until when, and whether the trainer still lives."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
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
    """The first notice. ``at_s`` is epoch, ``began_s`` monotonic."""

    source: str
    at_s: float
    began_s: float


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
        self._pod_since_s = self._started_at_s
        self._ended_in_order_at_s: float | None = None

    def begin(self, pod: str) -> None:
        """Sort what earlier lives left on the volume: of this pod, and of others before it."""
        self.clear_stale()
        self._trainer_before = self._volume.read_small(TRAINER_STATE)
        self._ended_in_order_at_s = _ended_in_order_at_s(self._volume.read_small(EXIT_REPORT))
        since_s = _pod_since_s(self._volume.read_small(POD), pod)
        if since_s is not None:
            self._pod_since_s = since_s
            return
        try:
            publish(self._volume.root / POD, json.dumps({"pod": pod, "since": rfc3339(self._started_at_s)}).encode())
        except OSError as error:
            log.warning("pod_not_written", path=POD, error=error.strerror)

    def notice(self, source: str, *, at_s: float | None = None) -> bool:
        """The pod is going. Returns whether that is news."""
        now_s = time.time()
        at_s = now_s if at_s is None else min(at_s, now_s)
        if self.going is not None and self.going.at_s <= at_s:
            return False
        news = self.going is None
        self.going = Going(source, at_s, time.monotonic() - (now_s - at_s))
        if self._volume.read_small(TERMINATING) is None:
            try:
                publish(self._volume.root / TERMINATING, encode_notice(Notice(rfc3339(at_s), source)))
            except OSError as error:  # a full disk: the trainer has its own signal
                log.warning("notice_not_written", error=error.strerror)
        return news

    def expire(self) -> bool:
        """Drop a notice that no SIGTERM followed within the grace period: the pod stays. Returns whether there was one."""
        if self.sigterms or not self._is_overdue():
            return False
        self._drop()
        return True

    def sigterm(self) -> None:
        """The sidecar itself was told to end."""
        self.sigterms += 1
        if self.sigterms == 1 and self._is_overdue():
            self._drop()  # an old notice must not have used up this one's time
        self.notice("sigterm")

    def _is_overdue(self) -> bool:
        left_s = self.left_s()
        return left_s is not None and left_s <= 0

    def _drop(self) -> None:
        self.going = None
        self._unlink_notice()

    def _unlink_notice(self) -> None:
        with contextlib.suppress(OSError):  # a volume that is away or read-only: the clock is what counts
            (self._volume.root / TERMINATING).unlink(missing_ok=True)

    def look(self) -> bool:
        """Take notice of the hook's ``terminating`` file. Returns whether it is news."""
        raw = self._volume.read_small(TERMINATING)
        if raw is None or self.going is not None:
            return False
        notice = parse_notice(raw)
        at_s = epoch_seconds(notice.at) if notice.at else None
        if at_s is not None and at_s < self._started_at_s - self._grace_s:
            return False  # left behind by an earlier life of this pod
        return self.notice(notice.source or "sigterm", at_s=at_s)

    def clear_stale(self) -> None:
        """Remove a notice that an earlier life of this pod left: a container that starts is not going."""
        raw = self._volume.read_small(TERMINATING)
        if raw is None:
            return
        notice = parse_notice(raw)
        if notice.at is None or epoch_seconds(notice.at) < self._started_at_s - self._grace_s:
            self._unlink_notice()

    def deadline_s(self) -> float | None:
        """Return the monotonic instant by which everything must be done, or ``None`` while nobody gave notice."""
        if self.going is None:
            return None
        return self.going.began_s + self._grace_s - margin_s(self._grace_s)

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
                pod_since_s=self._pod_since_s,
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
