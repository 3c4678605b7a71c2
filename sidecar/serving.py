"""Limits of HTTP servers: number of connections, time of a request, time until an answer is read; bodies."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import Message, Receive
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

_NO_NEWS = (
    "Cancel 0 running task(s)",
    "Invalid HTTP request received.",
    "Unsupported upgrade request.",
    "No supported WebSocket library detected.",
)


def most_connections(at_most: int, *, share: int) -> int:
    """Return how many connections a server holds: of the descriptors that this process may open, one in ``share``."""
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return at_most if most_files == resource.RLIM_INFINITY else max(4, min(at_most, most_files // share))


def is_news(record: logging.LogRecord) -> bool:
    """Filter what uvicorn says of no task that it cancelled, and of clients: any process or web page could fill the log."""
    return not record.getMessage().startswith(_NO_NEWS)


class Connection(H11Protocol):
    """uvicorn's connection with these limits. uvicorn's own limit on concurrency would refuse probes, too."""

    most = most_connections(256, share=4)
    """Maximum number of connections."""
    request_s = 10.0
    """Seconds for a client to send the head of a request, TLS included."""
    unread_s = 30.0
    """Seconds for which a client may leave its answer unread."""
    waits_since_s = 0.0
    """Since when no request is being answered, in seconds of the event loop's clock."""
    _request_is_due: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    @classmethod
    def backlog(cls) -> int:
        """Return how many the kernel holds. asyncio accepts as many at once, before any is closed for being too many."""
        return max(1, cls.most // 2)

    @property
    def is_answering(self) -> bool:
        """Whether a request has arrived whose answer is not complete."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        """Accept a connection; at the limit, close the one that has been idle for the longest time."""
        full = sum(not other.transport.is_closing() for other in self.connections) >= self.most
        super().connection_made(transport)
        self._waits()
        if full and (longest := self._longest_waiting()) is not None:
            longest.transport.abort()

    def _longest_waiting(self) -> Connection | None:
        """Return the connection idle for the longest time; this one if all others are being answered."""
        waiting = [
            c for c in self.connections if isinstance(c, Connection) and not c.is_answering and not c.transport.is_closing()
        ]
        return min(waiting, key=lambda c: c.waits_since_s, default=None)

    def data_received(self, data: bytes) -> None:
        """Receive bytes of a request."""
        super().data_received(data)
        if self.is_answering:
            self._has_arrived()
        elif self._request_is_due is None:  # the beginning of another request, or an unread body
            self._waits()

    def on_response_complete(self) -> None:
        """Wait for the next request; uvicorn's keep-alive timeout applies until its first byte, which may be there already."""
        self.waits_since_s = self.loop.time()
        super().on_response_complete()
        if not self.is_answering and self.conn.trailing_data[0] and self._request_is_due is None:
            self._waits()

    def pause_writing(self) -> None:
        """Start the time limit: the client does not read."""
        super().pause_writing()
        self._unread = self._unread or self.loop.call_later(self.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the time limit: the client has read."""
        self._was_read()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection."""
        self._has_arrived()
        self._was_read()
        super().connection_lost(exc)

    def _waits(self) -> None:
        self.waits_since_s = self.loop.time()
        self._request_is_due = self.loop.call_later(self.request_s, self.transport.abort)

    def _has_arrived(self) -> None:
        if self._request_is_due is not None:
            self._request_is_due.cancel()
            self._request_is_due = None

    def _was_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


class Disconnected(Exception):
    """The client disconnected before the end of its request's body."""


async def body_of(receive: Receive) -> AsyncIterator[bytes]:
    """Yield a request's body as it arrives.

    Raises:
        Disconnected: It is incomplete.
    """
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        yield message.get("body", b"")
        more = message.get("more_body", False)


def replayed(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that replays a body already read, then passes on further messages, such as a disconnect."""
    given = False

    async def give() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return give
