"""The threads in which requests to the store run, the gate that all sent bytes pass, and trying again."""

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
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar

import structlog

from sidecar.core.backoff import CAP_S, delay_s
from sidecar.core.concurrency import Concurrency, SmallRequests, is_near, small_requests
from sidecar.core.parts import usual_part_bytes
from sidecar.core.throughput import Pace, Rate, Throughput, estimated
from sidecar.errors import AccessRefused, AlreadyExists, CorruptObject, NotFound, Stopped, StoreBusy, StoreError

log = structlog.get_logger()
T = TypeVar("T")

CORRUPT_TRIES = 3
"""How often bytes that arrived wrong are sent or fetched again before it counts as more than an accident of the wire."""


HURRIED_CAP_S = 1.0
"""Longest wait between two tries once the pod is known to be going."""
SPARE_THREADS = 4
"""For small requests, so that they need not wait for large ones."""
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_LOWEST_BEST_EFFORT = (2 << 13) | 7
"""Not "idle": a busy disk would starve the flush. Source: ioprio_set(2)."""


_is_awaited: ContextVar[bool] = ContextVar("is_awaited", default=False)


@contextlib.contextmanager
def awaited() -> Iterator[None]:
    """The trainer waits for what is asked of the store inside, also by tasks that begin inside: it has a normal priority."""
    before = _is_awaited.set(True)
    try:
        yield
    finally:
        _is_awaited.reset(before)


class RateGate:
    """Lets bytes through at a limited rate, or stops them. Threads wait in it; a new limit applies at once."""

    def __init__(self, bytes_per_s: int | None) -> None:
        self._condition = threading.Condition()
        self._bytes_per_s = bytes_per_s
        self._closed = False
        self._free_at_s = 0.0
        self.passed_bytes = 0
        """All that was let through."""

    @property
    def bytes_per_s(self) -> int | None:
        """The limit."""
        return self._bytes_per_s

    def limit(self, bytes_per_s: int | None) -> None:
        """Change the limit; ``None`` lifts it."""
        with self._condition:
            self._bytes_per_s = bytes_per_s
            self._free_at_s = 0.0
            self._condition.notify_all()

    def close(self) -> None:
        """End every transfer at its next block."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def check(self) -> None:
        """Raise if the gate is closed: for downloads, which are not limited.

        Raises:
            Stopped: The gate is closed.
        """
        if self._closed:
            raise Stopped("transfers were stopped")

    def pass_through(self, size_bytes: int) -> None:
        """Wait until ``size_bytes`` may be sent.

        Raises:
            Stopped: The gate is closed.
        """
        if self._bytes_per_s is None:  # without the lock, which all threads would share for each block
            self.check()
            return
        with self._condition:
            if self._bytes_per_s is not None:
                now_s = time.monotonic()
                # No credit is saved up while idle, so that a pause is not followed by a burst.
                self._free_at_s = max(self._free_at_s, now_s)
                mine_s = self._free_at_s
                self._free_at_s += size_bytes / self._bytes_per_s
                while not self._closed and (left_s := mine_s - time.monotonic()) > 0 and self._bytes_per_s is not None:
                    self._condition.wait(left_s)
            self.check()
            self.passed_bytes += size_bytes

    def wait_while(self, held: Callable[[], bool]) -> None:
        """Wait until ``held`` is false; ``wake`` makes it be looked at again.

        Raises:
            Stopped: The gate is closed.
        """
        with self._condition:
            while held() and not self._closed:
                self._condition.wait()
            self.check()

    def wake(self) -> None:
        """Let all who wait look again."""
        with self._condition:
            self._condition.notify_all()


class Turnstile:
    """The gate as the bytes of one checkpoint pass it: they are counted, and they can be held in the middle of a request."""

    def __init__(self, gate: RateGate) -> None:
        self._gate = gate
        self._counting = threading.Lock()
        self._held = False
        self._let_through = 0
        self._going_on: set[int] = set()
        """Threads that go on all the same."""
        self.passed_bytes = 0

    @property
    def is_held(self) -> bool:
        """Whether it is held."""
        return self._held

    def hold(self, held: bool, *, but: int = 0) -> None:
        """Let nothing through until it is let go again. What the kernel was given is on its way.

        Args:
            held: Whether to hold.
            but: So many requests are let through to their end, because others wait for their place.
        """
        if (held, but) != (self._held, self._let_through):
            self._held, self._let_through = held, but
            self._going_on = self._going_on if held else set()
            self._gate.wake()

    def pass_through(self, size_bytes: int) -> None:
        """Wait until ``size_bytes`` may be sent.

        Raises:
            Stopped: The gate is closed.
        """
        self._gate.wait_while(self._is_held)
        self._gate.pass_through(size_bytes)
        with self._counting:
            self.passed_bytes += size_bytes

    def _is_held(self) -> bool:
        thread, going_on = threading.get_ident(), self._going_on
        if self._held and len(going_on) < self._let_through:
            going_on.add(thread)
        return self._held and thread not in going_on


class Health:
    """Whether the store answers. The latest trouble stays until a request succeeds."""

    def __init__(self, on_change: Callable[[str | None], None] = lambda _: None) -> None:
        self._on_change = on_change
        self.trouble: str | None = None

    def failed(self, error: StoreError) -> None:
        """A request failed for a reason that lies in the store or on the way to it."""
        before, self.trouble = self.trouble, str(error)
        if before is None:
            self._on_change(self.trouble)

    def succeeded(self) -> None:
        """A request succeeded."""
        if self.trouble is not None:
            self.trouble = None
            self._on_change(None)


class Standing:
    """Whether whoever sends may go on trying, or has to make way between two tries."""

    def __init__(self, on_refused: Callable[[], None] = lambda: None) -> None:
        self._changed = asyncio.Event()
        self._on_refused = on_refused
        self.behind = False
        """Something else goes first."""
        self.refused = False
        """The store does not want what is sent: waiting alone will not help."""

    def put(self, *, behind: bool) -> None:
        """Change it, and wake who waits to try again."""
        if behind and not self.behind:
            self._changed.set()
            self._changed = asyncio.Event()
        self.behind = behind

    async def lost(self) -> None:
        """Wait until something else goes first."""
        await self._changed.wait()

    def answered(self, *, refused: bool) -> None:
        """The store answered; tell who orders the queue when that is news."""
        if refused != self.refused:
            self.refused = refused
            self._on_refused()


class Transfers:
    """Runs blocking store calls in a bounded number of threads, for ever until they succeed."""

    def __init__(self, *, concurrency: int, gate: RateGate, health: Health, part_bytes: int | None = None) -> None:
        """Begin with nothing known. ``part_bytes`` is how large all parts should be; ``None``: it depends."""
        self._part_bytes = part_bytes
        self.most = concurrency
        """Requests with a body at once, at most."""
        self.gate = gate
        self.health = health
        self.sent = Throughput()
        self.pace = Pace()
        self.sent_bytes = 0
        self.retries = 0
        self.adapted = self._concurrency(round_trip_s=None)
        self.small = SmallRequests(concurrency, 1)
        """How requests are sent that cost a round trip, and hardly any bytes."""
        self._is_near = False
        self._hurried = asyncio.Event()
        self._polite = ThreadPoolExecutor(concurrency + SPARE_THREADS, "transfer", initializer=_lowest_priority)
        # A thread cannot take its politeness back: there are others for what is waited for. They begin when they are used.
        self._urgent = ThreadPoolExecutor(concurrency + SPARE_THREADS, "transfer-urgent")

    async def once(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a store call in a thread, once.

        Raises:
            StoreError: As the call does.
        """
        threads = self._urgent if self._hurried.is_set() or _is_awaited.get() else self._polite
        result = await asyncio.get_running_loop().run_in_executor(threads, functools.partial(call, *args, **kwargs))
        self.health.succeeded()
        return result

    async def persistently(
        self,
        call: Callable[..., T],
        *args: Any,
        standing: Standing | None = None,
        before_again: Callable[[], Awaitable[None]] | None = None,
        **kwargs: Any,
    ) -> T:
        """Run a store call until it succeeds, with capped and jittered waits between.

        Raises:
            NotFound, AlreadyExists, CorruptObject: An answer, not a failure (corrupt: after ``CORRUPT_TRIES``).
            Stopped: The gate was closed.
            Exception: What ``before_again`` raises; it is awaited before each further try.
            StoreError: The latest failure, when ``standing`` says that something else goes first.
        """
        failures = 0
        while True:
            try:
                result = await self.once(call, *args, **kwargs)
            except StoreError as error:
                failures += 1
                if _is_answer(error) or (isinstance(error, CorruptObject) and failures >= CORRUPT_TRIES):
                    raise
                wait_s = self._failed(error, failures)
                if standing is not None:
                    standing.answered(refused=isinstance(error, AccessRefused))
                    if standing.behind:
                        raise
                await self.pause(wait_s, standing)
                if standing is not None and standing.behind:
                    raise
                if before_again is not None:
                    await before_again()
            else:
                if standing is not None:
                    standing.answered(refused=False)
                return result

    async def together(self, works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Run several calls at the same time. Returns what they return, in order.

        Raises:
            StoreError: The first failure, once all have ended.
        """
        ended = await asyncio.gather(*works, return_exceptions=True)
        for outcome in ended:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in ended if not isinstance(outcome, BaseException)]

    def _failed(self, error: StoreError, failures: int) -> float:
        """Take note of a failure and return how long to wait."""
        self.retries += 1
        if isinstance(error, StoreBusy):
            self.adapted = self.adapted.slowed_down(now_s=time.monotonic())
        if not isinstance(error, CorruptObject):
            self.health.failed(error)
        cap_s = HURRIED_CAP_S if self._hurried.is_set() else CAP_S
        wait_s = delay_s(failures, random_0_1=random.random(), cap_s=cap_s)  # noqa: S311 - spreads retries
        log.warning("store_request_failed", error=str(error), failures=failures, again_in_s=round(wait_s, 1))
        return wait_s

    async def pause(self, wait_s: float, standing: Standing | None = None) -> None:
        """Wait, at most until the pod turns out to be going, or something else goes first than what ``standing`` is of."""
        waits: list[Coroutine[Any, Any, object]] = [] if self._hurried.is_set() else [self._hurried.wait()]
        waits += [] if standing is None else [standing.lost()]
        tasks = [asyncio.create_task(wait) for wait in waits]
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(wait_s)
        finally:
            for task in tasks:
                task.cancel()

    def is_away(self, round_trip_s: float | None) -> None:
        """Take note of how far away the store is, before anything is sent."""
        self.adapted = self._concurrency(round_trip_s=round_trip_s)
        self.small = small_requests(most=self.most, round_trip_s=round_trip_s)
        self._is_near = is_near(round_trip_s)

    def part_bytes(self, size_bytes: int) -> int:
        """Return how large the parts of a file of so many bytes should be."""
        if self._part_bytes is not None:
            return self._part_bytes
        rate = self.rate()
        known = self.gate.bytes_per_s if rate is None else rate.expected
        return usual_part_bytes(size_bytes, is_near=self._is_near, bytes_per_s=known)

    def _concurrency(self, *, round_trip_s: float | None) -> Concurrency:
        cores = len(os.sched_getaffinity(0))
        return Concurrency.begin(most=self.most, cores=cores, now_s=time.monotonic(), round_trip_s=round_trip_s)

    def rate(self, *, roughly: bool = False) -> Rate | None:
        """Return what to plan with, or ``None`` before anything is known. ``roughly``: a few small requests are enough."""
        arrived = self.sent.bytes_per_s() if roughly else self.sent.telling_bytes_per_s()
        return estimated(arrived=arrived, pace=self.pace, limit=self.gate.bytes_per_s)

    def hurry(self) -> None:
        """The pod is going: whoever waits to try again tries now, and waits shorter; what begins now has a normal priority."""
        self._hurried.set()

    def calm(self) -> None:
        """The pod stays after all: waits are as long, and priorities as low, as before."""
        self._hurried.clear()

    def count(self, size_bytes: int, *, began_s: float) -> None:
        """Record bytes that arrived in the store. ``began_s`` is monotonic."""
        now_s = time.monotonic()
        self.sent_bytes += size_bytes
        self.sent.add(size_bytes, began_s=began_s, now_s=now_s)
        self.adapted = self.adapted.sent(size_bytes, now_s=now_s)

    def close(self) -> None:
        """Stop all transfers; threads that are in a request end with it."""
        self.gate.close()
        for threads in (self._polite, self._urgent):
            threads.shutdown(wait=False, cancel_futures=True)


def _is_answer(error: StoreError) -> bool:
    return isinstance(error, NotFound | AlreadyExists)


def _lowest_priority() -> None:
    # On Linux all of this belongs to the thread: the API keeps its own.
    with contextlib.suppress(OSError):  # who wakes up waits for its turn: fewer switches, a tenth less CPU
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_LOWEST_BEST_EFFORT)
