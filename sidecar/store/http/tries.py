"""Tries of one HTTP request: what each sent and received, and when the next one may start."""

from __future__ import annotations

import select
import time
from collections.abc import Callable

from sidecar.core.schedule import hedging
from sidecar.store.http.answer import Connection, HeadReader, OpenAnswer, begins_answer
from sidecar.store.http.dial import NotNeeded
from sidecar.store.http.link import TICK_S
from sidecar.store.http.tls import TlsConnection
from sidecar.store.slice import FileSlice, Gate

PEEK_BYTES = 4 << 10


class Watcher:
    """Polls a connection for received bytes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._tls = connection if isinstance(connection, TlsConnection) else None
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def readable(self) -> bool:
        """Whether bytes or EOF can be read now."""
        return (self._tls is not None and self._tls.has_unread) or bool(self._poll.poll(0))

    def early(self) -> bool:
        """Whether an answer arrived while a body is sent. Always False over TLS: session tickets can arrive at any time."""
        return self._tls is None and self.readable() and begins_answer(self._connection.link.peek(PEEK_BYTES))


class Try:
    """One try of a request: the request on one connection. Times are monotonic seconds."""

    def __init__(self, connection: Connection, body: FileSlice | bytes | None, *, is_new: bool) -> None:
        self.connection = connection
        self.body = body
        self.is_new = is_new
        self.is_hedge = False
        self.is_answered = False
        self.sent_s = 0.0
        """When the last byte is known to have left; 0: not sent yet."""
        self._head: HeadReader | None = None
        self._queued_bytes: int | None = None
        """Bytes in the kernel's send buffer when they were last seen to shrink; ``_queued_s``: when that was."""
        self._queued_s = 0.0

    def head(self, method: str) -> OpenAnswer:
        """Wait up to ``TICK_S`` seconds for the head of the answer.

        Raises:
            BlockingIOError: It has not arrived yet.
            OSError, HTTPException: The connection was lost.
        """
        if self._head is None:
            self._head = HeadReader(self.connection, method)
        self.connection.link.patient = False
        answer = self._head.read(TICK_S)
        self.connection.link.patient, self.is_answered = True, True
        return answer

    def is_leaving(self, now_s: float) -> bool:
        """Whether the kernel's send buffer is still draining; if so, ``sent_s`` becomes ``now_s``."""
        queued_bytes, before = self.connection.link.queued_bytes(), self._queued_bytes
        is_leaving = before is not None and hedging.is_moving(before - queued_bytes, in_s=now_s - self._queued_s)
        if is_leaving:
            self.sent_s = now_s
        if is_leaving or before is None:
            self._queued_bytes, self._queued_s = queued_bytes, now_s
        return is_leaving


class AnswerGate:
    """Gate of a hedged body: stops sending it once another try is answered."""

    def __init__(self, gate: Gate, unless: Callable[[], bool]) -> None:
        self._gate = gate
        self._unless = unless

    def pass_through(self, size_bytes: int) -> None:
        """Pass through the gate of the first try. Raises ``NotNeeded`` once another try is answered."""
        if self._unless():
            raise NotNeeded
        self._gate.pass_through(size_bytes)


class HedgeState:
    """State of one request's hedging. Times are monotonic seconds."""

    def __init__(self, sent_s: float) -> None:
        self.moved_s = sent_s
        """When the last byte of any try left."""
        self.latest_s = sent_s
        """When the latest try was sent."""
        self.next_s = sent_s
        """When the next try may start."""
        self.begun = 1
        self.has_new = False
        """A try had a new connection. If that is lost too, the cause is not a stale connection."""
        self.error: Exception | None = None
        self.held: tuple[Try, OpenAnswer] | None = None
        """An error answer, returned unless another try succeeds before ``hold_until_s``."""
        self.hold_until_s = 0.0

    def hold(self, attempt: Try, answer: OpenAnswer) -> None:
        """Hold an error answer back for ``hedging.HOLD_S`` seconds."""
        self.held, self.hold_until_s = (attempt, answer), time.monotonic() + hedging.HOLD_S

    def left_s(self) -> float:
        """Return the seconds until the next decision."""
        next_s = self.hold_until_s if self.held is not None else self.next_s
        return max(hedging.MIN_WAIT_S, next_s - time.monotonic())


def any_is_answered(tries: list[Try], within_s: float = 0.0) -> bool:
    """Whether bytes or EOF arrived on one of the connections, now or within ``within_s`` seconds."""
    poll = select.poll()
    for attempt in tries:
        if isinstance(attempt.connection, TlsConnection) and attempt.connection.has_unread:
            return True
        poll.register(attempt.connection, select.POLLIN)
    return bool(poll.poll(within_s * 1000))
