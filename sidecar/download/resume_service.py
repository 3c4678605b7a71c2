"""Queue of resume requests: one at a time, the trainer's first; answers are kept."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from sidecar.core.format.rank_layout import Share
from sidecar.download.request import LATEST, AskedBy, ResumeRequest, ResumeState, ResumeStatus
from sidecar.download.request_worker import RequestWorker
from sidecar.download.store_reader import StoreReader
from sidecar.tasks import within

KEPT_ANSWERS = 16
"""Maximum number of ended requests whose answers are kept, and whose checkpoints are protected from deletion."""
KEPT_S = 3600.0
"""Seconds for which answers are kept at most; the trainer's latest answer stays."""
MOST_WAITING = 32
"""Maximum number of unanswered requests."""


class TooManyRequests(Exception):
    """``MOST_WAITING`` requests are unanswered (backpressure)."""


class ResumeService:
    """Resume requests by id. The trainer's latest one has priority, then the others in order of arrival.

    One at a time, because two downloads would only share the link and the space on the volume. A preempted request keeps its
    place, and never gets the answer of another one.
    """

    def __init__(self, worker: RequestWorker, reader: StoreReader, *, enabled: bool) -> None:
        self._worker = worker
        self._reader = reader
        self._enabled = enabled
        self._requests: dict[str, ResumeRequest] = {}
        """Requests by id, in order of arrival."""
        self._trainers: ResumeRequest | None = None
        """The trainer's latest request; ``None``: none yet."""
        self._trainer_names_itself = False
        self._working: ResumeRequest | None = None
        self._task: asyncio.Task[None] | None = None
        self._turns: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def are_answered(self) -> bool:
        """Whether no request is worked on."""
        return self._working is None

    def in_use(self) -> frozenset[str]:
        """Return the checkpoints that are considered, downloaded or were given as answers. Retention deletes them nowhere."""
        self._forget()
        return frozenset().union(*(request.in_use for request in self._requests.values()))

    def is_in_use(self, name: str) -> bool:
        """Whether a checkpoint is among ``in_use``."""
        return name in self.in_use()

    def request(
        self,
        checkpoint: str = LATEST,
        train_call: int | None = None,
        share: Share | None = None,
        asked_by: AskedBy | None = None,
    ) -> ResumeStatus:
        """Add a request, or join an equal one that has no answer yet.

        Args:
            checkpoint: ``latest`` or a name.
            train_call: Only checkpoints of this ``train()`` call; ``None``: of any.
            share: Ranks that it is for; ``None``: every file.
            asked_by: The requester; ``None``: not given. That counts as the trainer, because older hooks do not give it, unless
                the trainer has identified itself to this sidecar process before.

        Raises:
            TooManyRequests: ``MOST_WAITING`` have no answer yet.
        """
        return self._shown(self._add_or_join(checkpoint, train_call, share, asked_by))

    def _add_or_join(
        self, checkpoint: str, train_call: int | None, share: Share | None, asked_by: AskedBy | None
    ) -> ResumeRequest:
        self._trainer_names_itself |= asked_by is AskedBy.TRAINER
        asked_by = asked_by or (AskedBy.PERSON if self._trainer_names_itself else AskedBy.TRAINER)
        joined = self._same(checkpoint, train_call, share, asked_by)
        if joined is None:
            if len([r for r in self._requests.values() if r.is_awaited and not r.has_ended]) >= MOST_WAITING:
                raise TooManyRequests
            joined = ResumeRequest(checkpoint, train_call, share, asked_by)
            self._requests[joined.id] = joined
        joined.polled_s = time.monotonic()
        if asked_by is AskedBy.TRAINER and joined is not self._trainers:
            if self._trainers is not None:
                self._trainers.is_awaited = False
            self._trainers = joined
        self._forget()
        self._next_turn()
        return joined

    def prefetch(self) -> None:
        """Start the trainer's most likely request before the trainer sends it, unless it has sent one already."""
        if self._trainers is None:
            self._add_or_join(LATEST, None, None, None).polled_s = None

    def status(self, identifier: str | None = None) -> ResumeStatus | None:
        """Return the status of a request; ``None``: it is unknown, or no longer kept.

        ``identifier``: ``None``: the trainer's latest request, or an idle status before the first one.
        """
        if identifier is None:
            return ResumeStatus() if self._trainers is None else self._shown(self._trainers)
        request = self._requests.get(identifier)
        return None if request is None else self._shown(request)

    async def progress(self, identifier: str | None = None, *, timeout_s: float) -> ResumeStatus | None:
        """Return the status when the request has ended, at the latest after ``timeout_s`` seconds; ``None`` as ``status``."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while True:
            request = self._trainers if identifier is None else self._requests.get(identifier)
            if request is None or request.has_ended:
                break
            if not request.is_awaited:
                request.is_awaited = True
                self._next_turn()
            request.open_polls += 1
            try:
                has_changed = await within(deadline_s - asyncio.get_running_loop().time(), request.changed())
            finally:
                request.open_polls -= 1
                request.polled_s = None if request.polled_s is None else time.monotonic()
            if not has_changed:
                break
        return self.status(identifier)

    def close(self) -> None:
        """Cancel the request in progress, and begin no other one; downloaded bytes are kept."""
        self._is_closed = True
        for task in (self._turns, self._task):
            if task is not None:
                task.cancel()

    def _same(self, checkpoint: str, train_call: int | None, share: Share | None, asked_by: AskedBy) -> ResumeRequest | None:
        """Return an equal unanswered request of the same kind of requester, or ``None``."""
        for request in self._requests.values():
            open_to = request is self._trainers or (request.asked_by, asked_by) == (AskedBy.PERSON, AskedBy.PERSON)
            if open_to and not request.has_ended and request.asks(checkpoint, train_call, share):
                return request
        return None

    def _first(self) -> ResumeRequest | None:
        """Return the request to work on now; ``None``: there is none."""
        waiting = [request for request in self._requests.values() if request.is_awaited and not request.has_ended]
        return min(waiting, key=lambda request: request is not self._trainers, default=None)

    def _next_turn(self) -> None:
        if self._is_closed:
            return
        if self._turns is None or self._turns.done():
            self._turns = asyncio.create_task(self._take_turns())
            return
        working, task = self._working, self._task
        if working is None or task is None or self._first() is working or working.is_interrupted:
            return  # a second cancellation would end the clean-up of the first
        working.is_interrupted = True
        task.cancel()

    async def _take_turns(self) -> None:
        while (request := self._first()) is not None:
            self._working = request
            request.begin()
            self._task = asyncio.create_task(self._answer(request))
            # A cancelled download first ends its threads and its publication, which use the next request's folder.
            await asyncio.wait({self._task})
            self._working = None
            if request.is_interrupted:
                request.begin()
            elif not request.has_ended:
                request.end(ResumeState.FAILED, detail="the sidecar is ending or hit a bug, see its log; ask again")

    async def _answer(self, request: ResumeRequest) -> None:
        if self._enabled:
            await self._worker.answer(request)
        else:
            self._worker.end(request, ResumeState.NONE, detail="CKPT_RESUME=off")

    def _forget(self) -> None:
        """Drop old answers, and requests that their requester has replaced by another one."""
        now_s = time.monotonic()
        over = [r for r in self._requests.values() if (r.has_ended or not r.is_awaited) and r is not self._trainers]
        aged = [r for r in over if now_s - (r.ended_s or r.asked_s) > KEPT_S]
        for request in {*aged, *over[: max(0, len(over) - KEPT_ANSWERS)]}:
            if request is not self._working:
                del self._requests[request.id]

    def _shown(self, request: ResumeRequest) -> ResumeStatus:
        return request.status if request.has_ended else replace(request.status, detail=self._waiting_for(request))

    def _waiting_for(self, request: ResumeRequest) -> str | None:
        if self._working is not None and request is not self._working:
            first = self._working.status.checkpoint or self._working.wanted
            return f"waits for another request: {first} of the {self._working.asked_by}"
        if self._reader.health.unreachable is not None:
            return f"{self._reader.health.unreachable}; trying again"
        if self._reader.downloader is None:
            return "the store was not reached yet; trying again"
        return None if self._reader.is_granted else "the pod that held the prefix is asked whether it is alive"
