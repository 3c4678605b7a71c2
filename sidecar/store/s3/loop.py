"""Event loop in a thread of its own, for the small requests of a store from all threads."""

from __future__ import annotations

import asyncio
import functools
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, TypeVar

from sidecar.errors import Stopped, StoreUnavailable
from sidecar.store.cancellation import is_cancelled, result_of
from sidecar.thread_pool import MORE_THREADS, ThreadPool

T = TypeVar("T")
End = Callable[[], Awaitable[object]]

END_S = 1.0
"""Longest wait for the loop's end, in seconds."""
CLOSED = "the store was closed"


class LoopThread:
    """Runs coroutines for callers in other threads. Thread-safe; starts with the first call, ends with ``close``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ends: list[End] = []
        self._end: weakref.finalize[..., LoopThread] | None = None
        self._closed = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and wait for its result.

        Raises:
            StoreUnavailable: The loop was closed, or has no thread yet.
            Stopped: The call of this thread was cancelled (``cancellation``); so was the coroutine.
        """
        if is_cancelled():  # the loop may send a request before it is told to cancel it
            work.close()
            raise Stopped("the request was cancelled")
        with self._lock:
            if self._closed:
                work.close()
                raise StoreUnavailable(CLOSED)
            try:
                loop = self._started()
            except StoreUnavailable:
                work.close()
                raise
            running = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return result_of(running)
        except CancelledError:
            raise StoreUnavailable(CLOSED) from None
        except BaseException:
            running.cancel()
            raise

    def at_end(self, end: End) -> Callable[[], None]:
        """Await ``end`` on the loop before it ends. It must not refer to this object.

        Returns:
            A function that has ``end`` awaited at once instead. It may be called from any thread, and refers to no caller.
        """
        with self._lock:
            self._ends.append(end)
            return functools.partial(_end_at_once, self._started(), self._ends, end)

    def close(self) -> None:
        """Cancel what runs; later calls fail."""
        with self._lock:
            self._closed = True
        if self._end is not None:
            self._end()

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=_run, args=(loop,), name="store-requests", daemon=True)
            try:
                loop.set_default_executor(ThreadPool(None, "resolve"))
                thread.start()
            except RuntimeError as error:  # a later request begins anew: a loop without a thread answers none
                loop.close()
                raise StoreUnavailable(
                    f"no thread for requests to the store ({error}): {MORE_THREADS}; it is tried again"
                ) from None
            self._loop, self._end = loop, weakref.finalize(self, _stop, loop, thread, self._ends)
        return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _end_at_once(loop: asyncio.AbstractEventLoop, ends: list[End], end: End) -> None:
    held: set[asyncio.Future[object]] = set()  # the loop itself keeps no task

    def begin() -> None:
        running = asyncio.ensure_future(end())
        held.add(running)
        running.add_done_callback(held.discard)

    with suppress(ValueError, RuntimeError):  # it was awaited before; the loop has ended
        ends.remove(end)
        loop.call_soon_threadsafe(begin)


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, ends: list[End]) -> None:
    async def end() -> None:
        try:
            running = asyncio.all_tasks() - {asyncio.current_task()}
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running, timeout=END_S)
            await asyncio.gather(*(ends.pop()() for _ in range(len(ends))), return_exceptions=True)
        finally:
            loop.stop()

    held: list[asyncio.Task[None]] = []
    loop.call_soon_threadsafe(lambda: held.append(loop.create_task(end())))
    if threading.current_thread() is not thread:  # else: collected by the garbage collector in the loop's own thread
        thread.join(END_S * 2)
