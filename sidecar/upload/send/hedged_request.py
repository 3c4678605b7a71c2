"""Hedged request: a slow request is sent a second time in parallel, and the first try that arrives counts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sidecar.errors import Stopped
from sidecar.store.slice import FileSlice, Gate

T = TypeVar("T")


class SendTry:
    """One try to send a body, through a gate. Once the try is cancelled, the gate lets nothing pass."""

    def __init__(self, gate: Gate, on_sent: Callable[[], object] | None = None) -> None:
        """Start a try. ``on_sent``: called, from a thread, after the last byte was sent; ``None``: nothing is called."""
        self._on_sent = on_sent
        self._gate = gate
        self._body: FileSlice | None = None
        self._changing = threading.Lock()
        self._is_through = False
        self.is_cancelled = False
        """Another try arrived first, so that the outcome of this one is ignored."""

    @property
    def left_bytes(self) -> int | None:
        """Bytes not sent yet; ``None`` before the start."""
        return None if self._body is None else self._body.size_bytes - self._body.tell()

    def carries(self, body: FileSlice) -> FileSlice:
        """Set the body, also of a retry, and return it."""
        self._body, self._is_through = body, False
        return body

    def all_sent(self) -> None:
        """Report that the last byte was sent. Called from a thread."""
        if self._on_sent is not None:
            self._on_sent()

    def pass_through(self, size_bytes: int) -> None:
        """Wait until ``size_bytes`` may be sent.

        Raises:
            Stopped: The try was cancelled, or the gate is closed.
        """
        self._gate.pass_through(size_bytes)
        with self._changing:
            if self.is_cancelled:
                raise Stopped("another try arrived first")
            self._is_through = self.left_bytes is not None and size_bytes >= self.left_bytes

    def cancel(self) -> bool:
        """Let nothing more pass. Returns True if the body is incomplete, so that the store will not keep it."""
        with self._changing:
            self.is_cancelled = True
            return not self._is_through


class HedgedRequest:
    """Carries out a request, and a second time in parallel after ``hedge``."""

    def __init__(self, gate: Gate, on_sent: Callable[[], object] | None = None) -> None:
        """Prepare the first try. Arguments as of ``SendTry``."""
        self._gate = gate
        self._on_sent = on_sent
        self._first = SendTry(gate, on_sent)
        self._hedged = asyncio.Event()

    @property
    def left_bytes(self) -> int | None:
        """Bytes of the first try not sent yet; ``None`` before its start."""
        return self._first.left_bytes

    @property
    def is_hedged(self) -> bool:
        """Whether there is a second try."""
        return self._hedged.is_set()

    def hedge(self) -> None:
        """Start the second try; the first one continues."""
        self._hedged.set()

    async def run(self, send: Callable[[SendTry], Awaitable[T]]) -> T:
        """Return the result of the first try that arrives; the other one stops sending.

        ``send``: sends the request with the given try.

        Raises:
            Exception: Raised by a try, if none arrived.
        """
        first = asyncio.ensure_future(send(self._first))
        hedged = asyncio.ensure_future(self._hedged.wait())
        await asyncio.wait({first, hedged}, return_when=asyncio.FIRST_COMPLETED)
        hedged.cancel()
        if first.done():
            return first.result()
        hedge = SendTry(self._gate, self._on_sent)
        second = asyncio.ensure_future(send(hedge))
        await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        if first.done():
            return await _settled_result(first, second, hedge)
        return await _settled_result(second, first, self._first)


async def _settled_result(ended: asyncio.Future[T], other: asyncio.Future[T], other_try: SendTry) -> T:
    if ended.exception() is not None:
        return await other
    if other_try.cancel():
        other.add_done_callback(lambda future: future.cancelled() or future.exception())  # nobody waits for its error any more
        return ended.result()
    # The store has the complete body of the other try: it arrives, too, and the store keeps the one that arrives last.
    await asyncio.wait({other})
    return ended.result() if other.exception() is not None else other.result()
