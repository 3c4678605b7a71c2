"""Deterministic asyncio event loop on simulated time. Processes can be killed: nothing of a dead one runs any more."""

from __future__ import annotations

import asyncio
import functools
import heapq
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any
from unittest.mock import patch

EPOCH_S = 4.0e9
"""Wall clock when time begins. Later than any real clock, so that change times of real files count as long past."""


MOST_AT_ONCE = 20_000
"""Callbacks at one instant, beyond which a schedule counts as stuck."""
ENDING_ROUNDS = 20
"""How often tasks that go on after they were cancelled are cancelled again."""


class Process:
    """A simulated operating system process: the tasks and callbacks that began in its context."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False

    def __repr__(self) -> str:
        return self.name


_process: ContextVar[Process | None] = ContextVar("process", default=None)


def current_process() -> Process | None:
    """Return the process whose callback runs now."""
    return _process.get()


class _Handle:
    """Scheduled callback; the subset of ``asyncio.Handle`` that asyncio itself uses."""

    __slots__ = ("args", "callback", "context", "is_cancelled", "when_s")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], context: Context, when_s: float) -> None:
        self.callback = callback
        self.args = args
        self.context = context
        self.when_s = when_s
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.when_s


class _Task(asyncio.Task[Any]):
    """Hashed by its number: sets of tasks have the same order in each run."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class SimulatedLoop(asyncio.AbstractEventLoop):
    """Runs callbacks in order of time. ``offload`` decides how calls for threads are carried out."""

    def __init__(self, offload: Callable[[SimulatedLoop, Any, Callable[[], Any]], asyncio.Future[Any]]) -> None:
        self.now_s = 0.0
        self.skew_s = 0.0
        """Time that the call that runs in a simulated thread has taken so far."""
        self.events = 0
        self.stop_reason: BaseException | None = None
        """Set to end ``run``: it is raised there."""
        self._offload = offload
        self._ready: deque[_Handle] = deque()
        self._timers: list[tuple[float, int, _Handle]] = []
        self._count = 0
        self._tasks: list[_Task] = []
        self._dropped: list[_Handle] = []
        """What would have run in processes that are dead."""
        self._is_ending = False
        self._is_closed = False

    # Running.

    def run(self, until_s: float) -> None:
        """Run until a time. Raises ``stop_reason`` when it is set."""
        ready, timers = self._ready, self._timers
        asyncio._set_running_loop(self)
        try:
            while True:
                most = self.events + MOST_AT_ONCE
                while ready:
                    self._run(ready.popleft())
                    if self.stop_reason is not None:
                        raise self.stop_reason
                    if self.events > most:
                        raise RuntimeError(f"{MOST_AT_ONCE} callbacks at one instant: something goes round and round")
                if not timers or timers[0][0] > until_s:
                    break
                self.now_s, _, handle = heapq.heappop(timers)
                ready.append(handle)
            self.now_s = until_s
        finally:
            asyncio._set_running_loop(None)

    def _run(self, handle: _Handle) -> None:
        if handle.is_cancelled:
            return
        process = handle.context.get(_process)
        if process is not None and process.is_dead and not self._is_ending:
            self._dropped.append(handle)
            return
        self.events += 1
        handle.context.run(handle.callback, *handle.args)

    def spawn(self, process: Process, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a coroutine as a process."""
        context = Context()
        context.run(_process.set, process)
        return self.create_task(coroutine, context=context)

    def close(self) -> None:
        """Cancel all tasks, also those of dead processes, and let them end: nothing is left to the garbage collector.

        What they do meanwhile changes nothing: calls for threads are not carried out any more.
        """
        self._is_ending = True
        self._timers.clear()
        self._ready.extend(self._dropped)
        asyncio._set_running_loop(self)
        try:
            for _ in range(ENDING_ROUNDS):
                left = [task for task in self._tasks if not task.done()]
                if not left:
                    break
                for task in left:
                    task.cancel()
                most = self.events + MOST_AT_ONCE
                while self._ready and self.events < most:
                    self._run(self._ready.popleft())
                timers, self._timers = self._timers, []
                for _, _, handle in timers:
                    self._run(handle)
        finally:
            asyncio._set_running_loop(None)
        self._is_closed = True
        for task in self._tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        self._ready.clear()
        self._tasks.clear()

    # What asyncio calls.

    def time(self) -> float:
        return self.now_s + self.skew_s

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        handle = _Handle(callback, args, copy_context() if context is None else context, self.now_s)
        if not self._is_closed:
            self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        handle = _Handle(callback, args, copy_context() if context is None else context, when)
        self._count += 1
        if not self._is_closed:
            heapq.heappush(self._timers, (max(when, self.now_s), self._count, handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> Any:
        task = _Task(coro, loop=self, name=name or "task", context=context)
        self._count += 1
        task.number = self._count
        self._tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        if self._is_ending:
            future = self.create_future()
            future.cancel()
            return future
        return self._offload(self, executor, (lambda: func(*args)) if args else func)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """As in production, an error that nobody awaits ends nothing."""

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._is_closed


@contextmanager
def simulated_time(loop: SimulatedLoop) -> Iterator[None]:
    """Give ``time.monotonic`` and ``time.time`` the loop's time, also where they are defaults: no module can miss it."""

    def epoch() -> float:
        return EPOCH_S + loop.now_s + loop.skew_s

    real = {time.monotonic: loop.time, time.time: epoch}
    functions = _with_a_clock()
    before = [(function, function.__defaults__, function.__kwdefaults__) for function in functions]
    boot = patch.object(time, "clock_gettime", lambda clock: loop.time())
    with patch.object(time, "monotonic", loop.time), patch.object(time, "time", epoch), boot:
        try:
            for function, defaults, named in before:
                function.__defaults__ = defaults and tuple(
                    real.get(value, value) if callable(value) else value for value in defaults
                )
                function.__kwdefaults__ = named and {
                    name: real.get(value, value) if callable(value) else value for name, value in named.items()
                }
            yield
        finally:
            for function, defaults, named in before:
                function.__defaults__, function.__kwdefaults__ = defaults, named


@functools.cache
def _with_a_clock() -> list[Any]:
    """Return the functions of the sidecar with a clock among their defaults."""
    found = []
    for name, module in list(sys.modules.items()):
        if not name.startswith("sidecar."):
            continue
        for owner in vars(module).values():
            if isinstance(owner, type) and owner.__module__ == name:
                found += [f for f in vars(owner).values() if isinstance(f, types.FunctionType)]
            elif isinstance(owner, types.FunctionType) and owner.__module__ == name:
                found.append(owner)
    clocks = (time.monotonic, time.time)
    return [f for f in found if any(d in clocks for d in (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()))]
