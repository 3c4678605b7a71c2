"""Executor of store requests: thread pools, retries with backoff, thread priorities, measured throughput."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import platform
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar, overload

import structlog

from sidecar.core.lifecycle.store_state import Evidence
from sidecar.core.schedule.backoff import CAP_S, delay_s
from sidecar.core.schedule.concurrency import Concurrency, SmallRequests, is_near, small_requests
from sidecar.core.schedule.parts import usual_part_bytes
from sidecar.core.schedule.throughput import Rate, RateEstimator, Throughput, estimated
from sidecar.errors import (
    AccessRefused,
    AlreadyExists,
    CorruptObject,
    NoFolder,
    NotFound,
    OversizedDocument,
    PartRefused,
    StoreBusy,
    StoreError,
    UnreadableRun,
    Unstorable,
    UnusableNow,
)
from sidecar.store.cancellation import Cancellation
from sidecar.thread_pool import ThreadPool
from sidecar.transfer.health import Health, is_silence
from sidecar.transfer.rate_gate import RateGate, RetryGate

log = structlog.get_logger()
T = TypeVar("T")
U = TypeVar("U")

CORRUPT_TRIES = 3
"""Attempts at a transfer whose bytes fail their checksum; after the last, the damage is not put down to the network."""
HURRIED_CAP_S = 1.0
"""Longest pause between two attempts after a termination notice, in seconds."""
SPARE_THREADS = 4
"""Threads beyond ``concurrency``, so that small requests do not wait for large ones."""
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_LOWEST_BEST_EFFORT = (2 << 13) | 7
"""Lowest level of the best-effort class. The idle class would let a busy disk starve the flush. Source: ioprio_set(2)."""


_ANSWERS = (NotFound, AlreadyExists, OversizedDocument, PartRefused)
"""Errors that are the store's answer: it is there."""
_is_awaited: ContextVar[bool] = ContextVar("is_awaited", default=False)


Judge = Callable[[AccessRefused], Awaitable[bool]]
"""Called after each refusal of one request. Returns whether the store delivers other objects; raises to end the retries."""
_judges: ContextVar[Callable[[], Judge] | None] = ContextVar("judges", default=None)


@contextlib.contextmanager
def refusals_judged(new_judge: Callable[[], Judge]) -> Iterator[None]:
    """Judge the refusals of requests made inside, also by tasks started inside: each request has its own judge."""
    before = _judges.set(new_judge)
    try:
        yield
    finally:
        _judges.reset(before)


@contextlib.contextmanager
def awaited() -> Iterator[None]:
    """Run store requests made inside, also by tasks started inside, at normal priority: the trainer waits for them."""
    before = _is_awaited.set(True)
    try:
        yield
    finally:
        _is_awaited.reset(before)


class StoreExecutor:
    """Runs blocking store calls in a bounded number of threads; ``persistently`` retries them until they succeed."""

    def __init__(
        self,
        *,
        concurrency: int,
        gate: RateGate,
        health: Health,
        part_bytes: int | None = None,
        patience_s: float | None = None,
    ) -> None:
        """Start without measurements.

        Args:
            concurrency: Maximum concurrent requests with a body.
            gate: Rate limit of all sent bytes.
            health: Records each request's outcome.
            part_bytes: Size of every part; ``None``: chosen by file size, latency and throughput.
            patience_s: Seconds for which ``persistently`` retries a failing request. A refusal and a missing folder
                are then not retried at all.
                ``None``: without limit.
        """
        self._patience_s = patience_s
        self.on_hurry: Callable[[bool], object] = lambda _: None
        """Called with True on a termination notice, with False when the notice is withdrawn."""
        self.on_back: Callable[[], object] = lambda: None
        """Called when a store that was away has answered."""
        self._part_bytes = part_bytes
        self.most = concurrency
        """Maximum concurrent requests with a body."""
        self.gate = gate
        self.health = health
        self.sent = Throughput()
        self.sent_rate = RateEstimator()
        self.sent_bytes = 0
        self.retries = 0
        self.adapted = self._concurrency(round_trip_s=None)
        self.small = SmallRequests(concurrency, 1)
        """Concurrency of small requests, whose cost is the round trip."""
        self.in_flight = 0
        """Requests to the store under way."""
        self._is_near = False
        self._hurried = asyncio.Event()
        self._answered = asyncio.Event()
        """Set when the next request succeeds, and replaced then."""
        self._polite = ThreadPool(concurrency + SPARE_THREADS, "transfer", initializer=_lowest_priority)
        # A thread cannot raise its priority again, so urgent requests have their own pool.
        self._urgent = ThreadPool(concurrency + SPARE_THREADS, "transfer-urgent")

    async def once(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a store call in a thread, without retries. If this task is cancelled, so are the call's small requests.

        Raises:
            StoreError: As the call does.
        """
        self.in_flight += 1
        try:
            result = await self.in_thread(call, *args, **kwargs)
        except _ANSWERS:
            self._record_answer()
            raise
        finally:
            self.in_flight -= 1
        self._record_answer()
        return result

    async def in_thread(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a call in a thread, as ``once``; that it returns says nothing about the store."""
        threads = self._urgent if self._hurried.is_set() or _is_awaited.get() else self._polite
        cancellation, made = Cancellation(), functools.partial(call, *args, **kwargs)
        try:
            result = await asyncio.get_running_loop().run_in_executor(threads, cancellation.run, made)
        except asyncio.CancelledError:
            cancellation.cancel()
            raise
        return result

    def _record_answer(self) -> None:
        was_away = self.health.is_away
        self.health.answered()
        if was_away:
            self.on_back()
        self._answered.set()
        self._answered = asyncio.Event()

    @property
    def waits_for_store(self) -> bool:
        """Whether the store is away, and its ``StoreWatch`` alone asks for it: requests begin once it has answered."""
        return self.health.is_watched and self.health.is_away

    def evidence(self) -> Evidence:
        """Return what is known of the store now."""
        return self.health.evidence(sent_bytes=self.gate.passed_bytes, is_limited=self.gate.bytes_per_s is not None)

    async def persistently(
        self,
        call: Callable[..., T],
        *args: Any,
        retry_gate: RetryGate | None = None,
        before_again: Callable[[], Awaitable[None]] | None = None,
        **kwargs: Any,
    ) -> T:
        """Run a store call until it succeeds, with capped, jittered backoff.

        Raises:
            NotFound, AlreadyExists, UnusableNow, OversizedDocument, Unstorable, PartRefused, UnreadableRun: Final answers,
                not retried.
            CorruptObject: After ``CORRUPT_TRIES`` attempts.
            RefusedObject: Where ``refusals_judged`` says so.
            Stopped: The gate was closed.
            Exception: Raised by ``before_again``, which is awaited before each retry.
            StoreError: The latest failure, when ``retry_gate`` is preempted, or has to wait for a store that is away, or when
                the patience of this executor is over.
        """
        request = object()
        try:
            made = functools.partial(call, *args, **kwargs)
            return await self._until_answered(request, made, retry_gate=retry_gate, before_again=before_again)
        finally:
            self.health.ended(request)

    async def _until_answered(
        self,
        request: object,
        call: Callable[[], T],
        *,
        retry_gate: RetryGate | None,
        before_again: Callable[[], Awaitable[None]] | None,
    ) -> T:
        failures, since_s, answers, is_upload = 0, 0.0, 0, retry_gate is not None
        judge = new_judge() if (new_judge := _judges.get()) is not None else None
        while True:
            try:
                result = await (self._upload(call) if is_upload else self.once(call))
            except StoreError as error:
                failures += 1
                if _is_answer(error) or (isinstance(error, CorruptObject) and failures >= CORRUPT_TRIES):
                    raise
                if failures == 1:
                    since_s, answers = time.monotonic(), self.health.answers
                if self._is_patience_over(error, since_s=since_s):
                    self.health.given_up(error)
                    raise
                is_alone = judge is not None and isinstance(error, AccessRefused) and await judge(error)
                wait_s = self._failed(error, failures, None if is_alone else request, is_upload=is_upload)
                if self._patience_s is not None:  # the last try is at its end, not up to half of it later
                    wait_s = min(wait_s, max(0.0, since_s + self._patience_s - time.monotonic()))
                if retry_gate is not None:
                    retry_gate.answered(refused=isinstance(error, AccessRefused))
                    if retry_gate.behind or self.waits_for_store:
                        raise
                is_outage = self.waits_for_store or (is_silence(error) and self.health.answers == answers)
                await self.pause(None if self.waits_for_store else wait_s, retry_gate, is_outage=is_outage)
                if retry_gate is not None and retry_gate.behind:
                    raise
                if before_again is not None:
                    await before_again()
            else:
                if retry_gate is not None:
                    retry_gate.answered(refused=False)
                return result

    async def _upload(self, call: Callable[[], T]) -> T:
        self.health.upload_begins()
        is_stored = False
        try:
            result = await self.once(call)
            is_stored = True
        finally:
            self.health.upload_ended(is_stored=is_stored)
        return result

    def _is_patience_over(self, error: StoreError, *, since_s: float) -> bool:
        """Whether a failing request is given up. ``since_s``: time of its first failure, monotonic seconds."""
        if self._patience_s is None:
            return False
        return isinstance(error, AccessRefused | NoFolder) or time.monotonic() - since_s >= self._patience_s

    @overload
    async def together(self, works: tuple[Coroutine[Any, Any, T], Coroutine[Any, Any, U]]) -> tuple[T, U]: ...
    @overload
    async def together(self, works: list[Coroutine[Any, Any, T]] | Iterator[Coroutine[Any, Any, T]]) -> list[T]: ...
    async def together(self, works: Iterable[Coroutine[Any, Any, Any]]) -> Any:
        """Run several coroutines concurrently and return their results in order; of a pair, as a pair.

        Raises:
            StoreError: The first failure in that order, after all have ended.
        """
        ended = await asyncio.gather(*works, return_exceptions=True)
        for outcome in ended:
            if isinstance(outcome, BaseException):
                raise outcome
        return tuple(ended) if isinstance(works, tuple) else ended

    def _failed(self, error: StoreError, failures: int, request: object | None, *, is_upload: bool) -> float:
        """Record a failure and return the backoff in seconds. ``request``: ``None`` if others of its kind succeed."""
        self.retries += 1
        if isinstance(error, StoreBusy):
            self.adapted = self.adapted.slowed_down(now_s=time.monotonic())
        is_trouble = not isinstance(error, CorruptObject) and request is not None
        if is_trouble:  # told by ``health``, for all requests together
            self.health.failed(error, request, is_upload=is_upload)
        cap_s = HURRIED_CAP_S if self._hurried.is_set() else CAP_S
        wait_s = delay_s(failures, random_0_1=random.random(), cap_s=cap_s)  # noqa: S311 - spreads retries
        if not is_trouble:
            log.warning("store_request_failed", error=str(error), failures=failures, again_in_s=round(wait_s, 1))
        return wait_s

    async def pause(self, wait_s: float | None, retry_gate: RetryGate | None = None, *, is_outage: bool = False) -> None:
        """Wait ``wait_s`` seconds (``None``: without limit); end early on a termination notice, or woken by ``retry_gate``.

        ``is_outage``: also when the store answers any request. It has answered none since this one failed first.
        """
        waits: list[Coroutine[Any, Any, object]] = [] if self._hurried.is_set() else [self._hurried.wait()]
        waits += [self._answered.wait()] if is_outage else []
        waits += [] if retry_gate is None else [retry_gate.woken()]
        tasks = [asyncio.create_task(wait) for wait in waits]
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(wait_s or 0.0)
        finally:
            for task in tasks:
                task.cancel()

    def set_round_trip(self, round_trip_s: float | None) -> None:
        """Set the initial concurrency from the store's round trip in seconds (``None``: unknown). Call before any upload."""
        self.adapted = self._concurrency(round_trip_s=round_trip_s)
        self.small = small_requests(most=self.most, round_trip_s=round_trip_s)
        self._is_near = is_near(round_trip_s)

    def part_bytes(self, size_bytes: int) -> int:
        """Return the part size in bytes for a file of ``size_bytes``."""
        if self._part_bytes is not None:
            return self._part_bytes
        rate = self.rate()
        known = self.gate.bytes_per_s if rate is None else rate.expected
        return usual_part_bytes(size_bytes, is_near=self._is_near, bytes_per_s=known)

    def _concurrency(self, *, round_trip_s: float | None) -> Concurrency:
        cores = len(os.sched_getaffinity(0))
        return Concurrency.begin(most=self.most, cores=cores, now_s=time.monotonic(), round_trip_s=round_trip_s)

    def rate(self) -> Rate | None:
        """Return the expected throughput, or ``None`` before any measurement."""
        return estimated(arrived=self.sent.telling_bytes_per_s(), sent=self.sent_rate, limit=self.gate.bytes_per_s)

    def usual_bytes_per_s(self, *, roughly: bool = False) -> float | None:
        """Return the throughput of a store that answers, in bytes per second; ``None``: not measured yet.

        What is sent while the store refuses requests or does not answer says nothing about that, only what arrived.
        ``roughly``: few small requests suffice.
        """
        arrived = self.sent.bytes_per_s() if roughly else self.sent.telling_bytes_per_s()
        sent = self.sent_rate if self.health.trouble is None else RateEstimator()
        rate = estimated(arrived=arrived, sent=sent, limit=self.gate.bytes_per_s)
        return rate.expected or None if rate is not None else None

    @property
    def is_hurried(self) -> bool:
        """Whether there is a termination notice."""
        return self._hurried.is_set()

    def hurry(self) -> None:
        """React to a termination notice: retry now, shorten further backoff, start new requests at normal priority."""
        self._hurried.set()
        self.on_hurry(True)

    def calm(self) -> None:
        """React to a withdrawn termination notice: restore the usual backoff and the low priority."""
        self._hurried.clear()
        self.on_hurry(False)

    def count(self, size_bytes: int, *, began_s: float) -> None:
        """Record bytes that the store has confirmed. ``began_s``: start of their request, monotonic seconds."""
        now_s = time.monotonic()
        self.sent_bytes += size_bytes
        self.sent.add(size_bytes, began_s=began_s, now_s=now_s)
        self.adapted = self.adapted.sent(size_bytes, now_s=now_s)

    def close(self) -> None:
        """Stop all transfers. A thread inside a request ends when that request does."""
        self.gate.close()
        for threads in (self._polite, self._urgent):
            threads.shutdown(wait=False, cancel_futures=True)


def _is_answer(error: StoreError) -> bool:
    return isinstance(
        error, NotFound | AlreadyExists | UnusableNow | OversizedDocument | Unstorable | PartRefused | UnreadableRun
    )


def _lowest_priority() -> None:
    # On Linux each of these applies to the calling thread alone: the API's threads keep their priority.
    with contextlib.suppress(OSError):  # SCHED_BATCH: fewer preemptions, a tenth less CPU
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_LOWEST_BEST_EFFORT)
