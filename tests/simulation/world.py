"""A clock, a network and a scheduler: coroutines await requests and sleeps, and nothing else ever happens."""

from __future__ import annotations

import heapq
import random
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from sidecar.core.schedule.concurrency import SmallRequests
from sidecar.errors import StoreError, StoreUnavailable

T = TypeVar("T")
EPOCH_S = 1.8e9
"""When time begins."""
SLOWEST_S = 3.0
"""Longest time a request or an answer is on its way."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Shares of requests to which something happens."""

    lost: float = 0.0
    """Never arrive; the client gives up on them."""
    unanswered: float = 0.0
    """Do what they should, and the client sees an error."""
    repeated: float = 0.0
    """Arrive again some time later."""
    slow: float = 0.0
    """Take up to ``SLOWEST_S``, each way."""


class Sleep:
    """Awaited: goes on after a time."""

    __slots__ = ("for_s",)

    def __init__(self, for_s: float) -> None:
        self.for_s = for_s

    def __await__(self) -> Generator[Sleep, Any, None]:
        yield self


class Rest:
    """Awaited: goes on when it is woken."""

    __slots__ = ("process",)

    def __init__(self) -> None:
        self.process: Process | None = None

    def __await__(self) -> Generator[Rest, Any, None]:
        yield self


class Event:
    """``asyncio.Event`` of the world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_set = False
        self._resting: list[Rest] = []

    def set(self) -> None:
        self._is_set = True
        for rest in self._resting:
            self._world.at(self._world.now_s, self._world.wake, rest)
        self._resting = []

    def clear(self) -> None:
        self._is_set = False

    async def wait(self) -> None:
        if not self._is_set:
            rest = Rest()
            self._resting.append(rest)
            await rest


class Together:
    """Awaited: several coroutines, some at once; goes on with what they return, in order."""

    __slots__ = ("at_once", "works")

    def __init__(self, works: Iterable[Coroutine[Any, Any, Any]], *, at_once: int) -> None:
        self.works = list(works)
        self.at_once = at_once

    def __await__(self) -> Generator[Together, Any, list[Any]]:
        return (yield self)


class Request:
    """Awaited: a store call that goes through the network."""

    __slots__ = ("args", "call", "issued_s", "kwargs")

    def __init__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.call = call
        self.args = args
        self.kwargs = kwargs
        self.issued_s = 0.0

    def __await__(self) -> Generator[Request, Any, Any]:
        return (yield self)


class Process:
    """A coroutine and whether it still runs. Its requests that are on their way survive it."""

    __slots__ = ("author", "coroutine", "is_alive")

    def __init__(self, author: Any, coroutine: Coroutine[Any, Any, None]) -> None:
        self.author = author
        self.coroutine = coroutine
        self.is_alive = True

    def kill(self) -> None:
        self.is_alive = False
        self.coroutine.close()


class World:
    """Everything that happens, in order of time. ``acting`` and ``issued_s`` say whose request is being carried out."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.random = random.Random(seed)
        self._draw = self.random.random
        self.faults = faults
        self.now_s = 0.0
        self.acting: Any = None
        self.issued_s = 0.0
        self.is_stray = False
        """Whether who sent the request that is being carried out has had its answer already, or is dead."""
        self.events = 0
        self.story: list[str] | None = None
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def clock(self) -> float:
        return self.now_s

    def epoch(self) -> float:
        return EPOCH_S + self.now_s

    def at(self, at_s: float, act: Callable[..., None], *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._queue, (at_s, self._count, act, args))

    def run(self, until_s: float) -> None:
        queue = self._queue
        while queue and queue[0][0] <= until_s:
            self.now_s, _, act, args = heapq.heappop(queue)
            self.events += 1
            act(*args)
        self.now_s = until_s

    def close(self) -> None:
        """Forget what has not happened yet."""
        self._queue.clear()

    def start(self, author: Any, coroutine: Coroutine[Any, Any, None]) -> Process:
        process = Process(author, coroutine)
        self.at(self.now_s, self._step, process, None, None)
        return process

    def tell(self, text: str) -> None:
        if self.story is not None:
            self.story.append(f"{self.now_s:7.2f} {text}")

    def _step(self, process: Process, value: Any, error: BaseException | None) -> None:
        if not process.is_alive:
            return
        try:
            awaited = process.coroutine.send(value) if error is None else process.coroutine.throw(error)
        except StopIteration:
            process.is_alive = False
            return
        finally:
            del error  # its traceback leads to this frame: a circle that only the garbage collector could cut
        if isinstance(awaited, Request):
            self._send(process, awaited)
        elif isinstance(awaited, Sleep):
            self.at(self.now_s + awaited.for_s, self._step, process, None, None)
        elif isinstance(awaited, Together):
            self._begin_together(process, awaited)
        else:
            awaited.process = process

    def _begin_together(self, process: Process, awaited: Together) -> None:
        left = list(enumerate(awaited.works))
        results: list[Any] = [None] * len(left)
        running = 0

        async def carry() -> None:
            nonlocal running
            while left:
                number, work = left.pop(0)
                results[number] = await work
            running -= 1
            if not running:
                self.at(self.now_s, self._step, process, results, None)

        running = min(awaited.at_once, len(left))
        if not running:
            self.at(self.now_s, self._step, process, results, None)
        for _ in range(running):
            self.start(process.author, carry())

    def wake(self, rest: Rest) -> None:
        """End a rest."""
        assert rest.process is not None
        self._step(rest.process, None, None)

    def _send(self, process: Process, request: Request) -> None:
        request.issued_s = self.now_s
        luck, faults = self._draw(), self.faults
        cut_off_s = process.author.cut_off
        there_s = self.now_s + self._way_s()
        if luck < faults.lost or cut_off_s[0] <= there_s < cut_off_s[1]:
            self.at(there_s + 1.0, self._step, process, None, StoreUnavailable("no answer"))
            return
        unanswered = luck < faults.lost + faults.unanswered
        self.at(there_s, self._arrive, process, request, unanswered)
        if luck > 1 - faults.repeated:
            self.at(there_s + SLOWEST_S * self._draw(), self._carry_out, process, request, True)

    def _way_s(self) -> float:
        chance = self._draw()
        return SLOWEST_S * self._draw() if chance < self.faults.slow else 0.01 + 0.1 * chance

    def _arrive(self, process: Process, request: Request, unanswered: bool) -> None:
        value, error = self._carry_out(process, request, not process.is_alive)
        if unanswered:
            value, error = None, StoreUnavailable("500 after the fact")
        self.at(self.now_s + self._way_s(), self._step, process, value, error)

    def _carry_out(self, process: Process, request: Request, is_stray: bool) -> tuple[Any, BaseException | None]:
        self.acting, self.issued_s, self.is_stray = process.author, request.issued_s, is_stray
        try:
            return request.call(*request.args, **request.kwargs), None
        except StoreError as error:
            return None, error.with_traceback(None)
        finally:
            self.acting = None


class FixedConcurrency:
    """A concurrency of large requests that does not adapt."""

    limit = 4

    def idle(self, *, now_s: float) -> FixedConcurrency:
        return self


class SimulatedExecutor:
    """What ``sidecar.transfer.executor.StoreExecutor`` promises, on the world's clock."""

    retries = 0
    most = 8
    small = SmallRequests(4, 1)

    def __init__(self, world: World) -> None:
        self._world = world
        self.adapted = FixedConcurrency()

    waits_for_store = False
    """No request alone asks for the store."""

    async def pause(self, wait_s: float) -> None:
        await Sleep(wait_s)

    @property
    def gate(self) -> SimulatedExecutor:
        return self

    def check(self) -> None:
        """Nothing stops a transfer."""

    async def once(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return await Request(call, *args, **kwargs)

    async def in_thread(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return call(*args, **kwargs)

    async def persistently(
        self,
        call: Callable[..., T],
        *args: Any,
        before_again: Callable[[], Awaitable[None]] | None = None,
        **kwargs: Any,
    ) -> T:
        tries = 0
        while True:
            try:
                return await Request(call, *args, **kwargs)
            except StoreUnavailable:
                tries += 1
                await Sleep(min(4.0, 0.25 * 2**tries) * (0.5 + self._world.random.random()))
                if before_again is not None:
                    await before_again()

    async def together(self, works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        left = list(works)
        try:
            return [await left.pop(0) for _ in range(len(left))]
        finally:
            for work in left:
                work.close()
