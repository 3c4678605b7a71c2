"""A resume request and its status."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from sidecar.core.commit.resume import PassedOver
from sidecar.core.format.rank_layout import Share
from trainer_hook.contract import SaveIdentity

LATEST = "latest"
UNPOLLED_S = 10.0
"""Seconds without a poll after which the requester counts as gone. The hook polls every 2 s."""


class ResumeState(StrEnum):
    """Progress of a resume request."""

    IDLE = "idle"
    CHOOSING = "choosing"
    DOWNLOADING = "downloading"
    READY = "ready"
    """``path`` can be loaded."""
    NONE = "none"
    """There is no checkpoint to resume from; ``passed_over`` has the reasons."""
    FAILED = "failed"
    """There is a checkpoint, but it cannot be fetched now; ``detail`` has the remedy."""


RESUME_ENDED = frozenset({ResumeState.READY, ResumeState.NONE, ResumeState.FAILED})


class AskedBy(StrEnum):
    """The requester."""

    TRAINER = "trainer"
    PERSON = "person"


OBSTRUCTION = {
    AskedBy.TRAINER: "another attempt finished it, or it was finished just now, and it differs from the commit: it is kept; "
    "rename or delete it",
    AskedBy.PERSON: "the trainer wrote it and may be writing to it now, and it differs from the commit: it is kept; rename or "
    "delete it once no trainer uses it",
}
"""Reason for which a directory on the volume is not replaced by a download, by requester."""


class Obstructed(Exception):
    """A directory on the volume obstructs the download of an unattended request. The text says so."""


@dataclass(frozen=True, slots=True)
class ResumeStatus:
    """Status of a resume request. Immutable: each change is a new value."""

    state: ResumeState = ResumeState.IDLE
    id: str | None = None
    """Id of the request; ``None``: there is no request."""
    asked_by: AskedBy | None = None
    requested: str | None = None
    train_call: int | None = None
    share: Share | None = None
    """The ranks that it is for; ``None``: all files."""
    checkpoint: str | None = None
    step: int | None = None
    path: str | None = None
    source: str | None = None
    """``local``: it was on the volume; ``store``: it was downloaded for this request; ``None``: not ready."""
    downloaded: bool | None = None
    """Its files were downloaded, by this request or an earlier one, such as the prefetch at start; ``None``: not ready."""
    save: SaveIdentity | None = None
    """The writing of the step; ``None``: not ready."""
    meta: dict[str, Any] = field(default_factory=dict)
    done_bytes: int = 0
    total_bytes: int = 0
    passed_over: tuple[PassedOver, ...] = ()
    detail: str | None = None


class ResumeRequest:
    """A resume request. Used from the event loop alone."""

    def __init__(self, wanted: str, train_call: int | None, share: Share | None, asked_by: AskedBy) -> None:
        self.id = uuid.uuid4().hex
        self.asked_by = asked_by
        self.wanted = wanted
        self.train_call = train_call
        self.share = share
        self.asked_s = time.monotonic()
        self.ended_s: float | None = None
        self.error: Exception | None = None
        """The error that ended the request before a decision about a checkpoint; ``None``: there was none."""
        self.is_awaited = True
        """The requester still waits. False after the trainer's next, different request, until this one is polled again."""
        self.is_interrupted = False
        """Another request preempted it: the outcome of its cancelled task does not count."""
        self.polled_s: float | None = self.asked_s
        """Time of the latest poll, monotonic seconds; ``None``: a prefetch by the sidecar, which no requester polls."""
        self.considered: str | None = None
        """The checkpoint whose documents are or were read last; ``None``: none yet, or the request has ended."""
        self.open_polls = 0
        """Number of polls that wait for the answer now."""
        self._news = asyncio.Event()
        self.status = ResumeStatus(
            ResumeState.CHOOSING, self.id, asked_by, requested=wanted, train_call=train_call, share=share
        )

    @property
    def has_ended(self) -> bool:
        """Whether the request has its answer."""
        return self.status.state in RESUME_ENDED

    @property
    def is_unattended(self) -> bool:
        """Whether no requester polls it: then the trainer may be training and writing checkpoints."""
        return self.polled_s is None or (not self.open_polls and time.monotonic() - self.polled_s > UNPOLLED_S)

    def asks(self, wanted: str, train_call: int | None, share: Share | None) -> bool:
        """Whether it asks for the same checkpoint, ``train()`` call and ranks."""
        return (self.wanted, self.train_call, self.share) == (wanted, train_call, share)

    @property
    def in_use(self) -> set[str]:
        """The checkpoints that must not be deleted for it."""
        return {name for name in (self.considered, self.status.checkpoint) if name is not None}

    def begin(self) -> None:
        """Start work on it, or start again after a preemption."""
        self.is_interrupted, self.considered = False, None
        self._show(replace(self.status, state=ResumeState.CHOOSING, passed_over=(), done_bytes=0, total_bytes=0, meta={}))

    def trying(self, checkpoint: str, step: int | None, size_bytes: int, meta: Mapping[str, Any]) -> None:
        """Record the checkpoint being tried."""
        self._show(replace(self.status, checkpoint=checkpoint, step=step, total_bytes=size_bytes, done_bytes=0, meta={**meta}))

    def downloading(self) -> None:
        """Record that its files are being downloaded."""
        self._show(replace(self.status, state=ResumeState.DOWNLOADING))

    def progressed(self, done_bytes: int, total_bytes: int) -> None:
        """Record received bytes. Also called by threads that outlive their download."""
        if self.status.state is ResumeState.DOWNLOADING:
            self._show(replace(self.status, done_bytes=done_bytes, total_bytes=total_bytes))

    def pass_over(self, passed: PassedOver) -> None:
        """Record a checkpoint that is not used."""
        known = [p for p in self.status.passed_over if p.checkpoint != passed.checkpoint]
        self._show(
            replace(
                self.status,
                state=ResumeState.CHOOSING,
                passed_over=(*known, passed),
                checkpoint=None,
                step=None,
                done_bytes=0,
                meta={},
            )
        )

    def end(self, state: ResumeState, **fields: Any) -> None:
        """End the request; ``fields`` are fields of the status."""
        self.ended_s, self.considered = time.monotonic(), None
        empty: dict[str, Any] = dict.fromkeys(("checkpoint", "step", "path", "source", "downloaded", "save", "detail"))
        self._show(replace(self.status, state=state, **(empty | {"meta": {}} | fields)))

    async def changed(self) -> None:
        """Wait for the next change."""
        await self._news.wait()

    def _show(self, status: ResumeStatus) -> None:
        if self.has_ended:
            return
        self.status = status
        self._news.set()
        self._news = asyncio.Event()
