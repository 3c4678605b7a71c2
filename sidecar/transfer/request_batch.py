"""Pipeline of small requests in one thread: several are in flight, and their answers are read in order.

A round trip between a thread and the event loop costs more than sending a small file, and so does waiting for its answer: the
thread sleeps and wakes up once per request, and competes with other threads for the interpreter.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Generic, TypeVar

T = TypeVar("T")
Result = TypeVar("Result")

BATCH_S = 0.05
"""Time in which a batch takes further requests, in seconds. It bounds how long a newer checkpoint waits for the thread."""
OVERTAKEN_AFTER_S = 0.25
"""Duration after which a batch counts as late, in seconds: it waits for an answer, and other batches overtake it."""


class RequestBatch(Generic[T]):
    """Small requests that one thread carries out. All methods but the constructor run in that thread."""

    def __init__(self, more: Callable[[], T | None], *, at_once: int, taken: Iterable[T] = ()) -> None:
        self.left = deque(taken)
        """Requests that were taken and have not ended, in order."""
        self._more = more
        self._at_once = at_once
        self._until_s = time.monotonic() + BATCH_S

    def run(self, begin: Callable[[T], AbstractContextManager[Callable[[], Result]]], end: Callable[[T, Result], None]) -> None:
        """Carry out the requests taken, and take more for ``BATCH_S``. Called again after an error, it takes no more.

        Args:
            begin: Sends a request; its context yields a function that waits for the answer.
            end: Called with the answer after the context has ended.

        Raises:
            Exception: Raised by one of these; the other requests in flight count as not begun.
        """
        under_way: deque[tuple[ExitStack, Callable[[], Result]]] = deque()
        try:
            while True:
                while len(under_way) < self._at_once and self._has(len(under_way)):
                    opened = ExitStack()
                    under_way.append((opened, opened.enter_context(begin(self.left[len(under_way)]))))
                if not under_way:
                    return
                opened, answered = under_way.popleft()
                with opened:
                    result = answered()
                end(self.left[0], result)
                self.left.popleft()
        except BaseException as error:
            self.take_no_more()
            for opened, _ in under_way:
                with suppress(Exception):
                    opened.__exit__(type(error), error, error.__traceback__)
            raise

    def take_no_more(self) -> None:
        """Take no further requests; those taken are carried out."""
        self._until_s = 0.0

    def _has(self, count: int) -> bool:
        """Whether more than ``count`` requests are left, or one more could be taken."""
        if len(self.left) > count:
            return True
        item = self._more() if time.monotonic() < self._until_s else None
        if item is not None:
            self.left.append(item)
        return item is not None
