"""A thread pool that goes on at a limit of processes, which a pod's containers share (``podPidsLimit``)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

MORE_THREADS = "raise the limit of processes of the pod or user (podPidsLimit, ulimit -u), or start fewer processes beside it"
"""The next step where a thread cannot be started."""


class ThreadPool(ThreadPoolExecutor):
    """A pool with a thread from the start, whose work waits for one of its threads where the kernel grants no further one.

    Its base class raises ``RuntimeError`` then, although it has queued the work; this one only as long as it has no thread.
    """

    def __init__(self, most: int | None, name: str, *, initializer: Callable[[], object] | None = None) -> None:
        """``most``: threads; ``None``: as many as asyncio has by default."""
        super().__init__(most, name, initializer)
        with suppress(RuntimeError):
            self.submit(int)

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if not self._threads:
                raise
