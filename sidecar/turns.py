"""Small requests in one thread: several are under way, and each ends in the order in which it began.

The way from a thread to the event loop and back costs more than a small file, and so does waiting for its answer: the thread
sleeps and wakes for each, and others compete with it for the interpreter.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Generic, TypeVar

T = TypeVar("T")
Result = TypeVar("Result")

MOMENT_S = 0.05
"""So long a thread goes on to the next one: a newer checkpoint waits no longer than that and what is under way then."""
LATE_S = 0.25
"""A turn that takes longer hangs on an answer: it does not hold up the others any more."""


class Turn(Generic[T]):
    """What one thread takes, one after another. All but the constructor runs in the thread."""

    def __init__(self, more: Callable[[], T | None], *, at_once: int, taken: Iterable[T] = ()) -> None:
        self.left = deque(taken)
        """What was taken and has not ended, in its order."""
        self._more = more
        self._at_once = at_once
        self._until_s = time.monotonic() + MOMENT_S

    def run(self, begin: Callable[[T], AbstractContextManager[Callable[[], Result]]], end: Callable[[T, Result], None]) -> None:
        """Carry what was taken, and more until the moment is over. Called again after an error, it takes no more.

        Args:
            begin: Sends a request; what its context yields waits for the answer.
            end: Told of the answer, when the context has ended.

        Raises:
            Exception: What one of these raised; others that were under way count as not begun.
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
            self._until_s = 0.0
            for opened, _ in under_way:
                with suppress(Exception):
                    opened.__exit__(type(error), error, error.__traceback__)
            raise

    def _has(self, count: int) -> bool:
        """Whether more than so many are left, or could be taken."""
        if len(self.left) > count:
            return True
        item = self._more() if time.monotonic() < self._until_s else None
        if item is not None:
            self.left.append(item)
        return item is not None
