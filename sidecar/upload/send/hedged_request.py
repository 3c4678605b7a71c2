"""A second try beside a request that is slow: whichever arrives first counts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sidecar.errors import Stopped
from sidecar.store.slice import FileSlice, Gate

T = TypeVar("T")


class Outgoing:
    """The body of one try, and the gate that it passes: nothing more passes once the try was given up."""

    def __init__(self, gate: Gate, on_left: Callable[[], object] = lambda: None) -> None:
        self.on_left = on_left
        """Told, from a thread, when the last byte has left."""
        self._gate = gate
        self._body: FileSlice | None = None
        self._changing = threading.Lock()
        self._is_through = False
        self._given_up = False

    @property
    def left_bytes(self) -> int | None:
        """What has not left, or ``None`` before it began."""
        return None if self._body is None else self._body.size_bytes - self._body.tell()

    @property
    def is_given_up(self) -> bool:
        """Whether another try arrived: what becomes of this one is of no interest."""
        return self._given_up

    def carries(self, body: FileSlice) -> FileSlice:
        """These are the bytes; sent again, they are other ones."""
        self._body, self._is_through = body, False
        return body

    def pass_through(self, size_bytes: int) -> None:
        """Wait until ``size_bytes`` may be sent.

        Raises:
            Stopped: It was given up, or the gate is closed.
        """
        self._gate.pass_through(size_bytes)
        with self._changing:
            if self._given_up:
                raise Stopped("another try arrived first")
            self._is_through = self.left_bytes is not None and size_bytes >= self.left_bytes

    def give_up(self) -> bool:
        """Let nothing more pass. Returns whether it will not arrive: the store was not given all of it."""
        with self._changing:
            self._given_up = True
            return not self._is_through


class HedgedRequest:
    """Carries a request, and carries it a second time when it is told to."""

    def __init__(self, outgoing: Callable[[], Outgoing]) -> None:
        self._outgoing = outgoing
        self._first = outgoing()
        self._wanted = asyncio.Event()

    @property
    def left_bytes(self) -> int | None:
        """What has not left of the first try, or ``None`` before it began."""
        return self._first.left_bytes

    @property
    def has_second(self) -> bool:
        """Whether there is a second try."""
        return self._wanted.is_set()

    def try_again(self) -> None:
        """Begin the second try; the first goes on."""
        self._wanted.set()

    async def run(self, carry: Callable[[Outgoing], Awaitable[T]]) -> T:
        """Return what the try that arrives first returned. What the other still has to send does not leave any more.

        Raises:
            Exception: What a try raised, if none arrived.
        """
        first = asyncio.ensure_future(carry(self._first))
        wanted = asyncio.ensure_future(self._wanted.wait())
        await asyncio.wait({first, wanted}, return_when=asyncio.FIRST_COMPLETED)
        wanted.cancel()
        if first.done():
            return first.result()
        beside = self._outgoing()
        second = asyncio.ensure_future(carry(beside))
        await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        if first.done():
            return await _judged(first, second, beside)
        return await _judged(second, first, self._first)


async def _judged(ended: asyncio.Future[T], other: asyncio.Future[T], its: Outgoing) -> T:
    if ended.exception() is not None:
        return await other
    if its.give_up():
        other.add_done_callback(_heard)
        return ended.result()
    # The store was given all of it: it arrives, too, and what arrives later is what the store keeps.
    await asyncio.wait({other})
    return ended.result() if other.exception() is not None else other.result()


def _heard(ended: asyncio.Future[T]) -> None:
    if not ended.cancelled():
        ended.exception()
