"""One try of a small request, on one connection that can be reset."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import BadStatusLine, HTTPException
from typing import Any

from aiobotocore.awsrequest import AioAWSResponse
from aiohttp.client_proto import ResponseHandler

from sidecar.core.schedule import hedging
from sidecar.store.http.answer import MAX_INTERIM_ANSWERS
from sidecar.store.http.link import ABORTIVE, queued_bytes

MAX_HEAD_BYTES = 1 << 20
"""Maximum length of heads, interim answers and trailers, and of what arrives while a body is found to be too long."""
_HTTP = b"HTTP/"


@dataclass
class Call:
    """Limits of one request that differ from the usual ones; and its answer's head and body."""

    most_bytes: int | None = None
    """Maximum length of the answer; ``None``: that of its operation."""
    within_s: float | None = None
    """Deadline for the answer in seconds after the request was sent, without hedging; ``None``: the store's, with hedging."""
    unwanted: Callable[[bytes], Awaitable[object]] | None = None
    """Awaited with the body of a second successful answer."""
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes = b""


class Attempt:
    """One try of a request: the request on one connection. Times are monotonic seconds."""

    task: asyncio.Task[AioAWSResponse]

    def __init__(self, *, is_fresh: bool, most_bytes: int) -> None:
        self.is_fresh = is_fresh
        """It must not use a connection that was used before."""
        self.is_hedge = False
        self.most_bytes = most_bytes
        self.began_s = time.monotonic()
        self.sent_s = 0.0
        """When a connection was there and the request began to leave; 0: not yet."""
        self.is_new = True
        """Its connection was made for it."""
        self._handler: Handler | None = None
        self._moved_bytes = 0
        self._queued_bytes: int | None = None
        self._queued_s = 0.0

    def connected(self, handler: Handler, *, is_new: bool) -> None:
        """Take a connection."""
        handler.begin(self.most_bytes + MAX_HEAD_BYTES)
        self._handler, self.is_new, self.sent_s = handler, is_new, time.monotonic()

    def answered(self) -> None:
        """Give the connection up to others: the answer was read to its end."""
        self._handler = None

    def is_moving(self, now_s: float) -> bool:
        """Whether the request is still leaving, or its answer arriving, faster than the floor on progress."""
        if self._handler is None or self._handler.transport is None:
            return False
        if self._handler.received_bytes - self._moved_bytes >= hedging.LEAST_MOVED_BYTES:
            self._moved_bytes = self._handler.received_bytes
            return True
        transport, before = self._handler.transport, self._queued_bytes
        left_bytes = transport.get_write_buffer_size() + queued_bytes(transport.get_extra_info("socket").fileno())
        is_leaving = before is not None and hedging.is_moving(before - left_bytes, in_s=now_s - self._queued_s)
        if is_leaving or before is None:
            self._queued_bytes, self._queued_s = left_bytes, now_s
        return is_leaving

    def give_up(self) -> None:
        """End it by a reset, so that nothing of the request leaves later."""
        if self._handler is not None and (transport := self._handler.transport) is not None:
            with suppress(OSError):
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORTIVE)
            transport.abort()
        self.task.cancel()


class Handler(ResponseHandler):
    """A connection whose answer may not be longer than agreed, with its heads, interim answers and trailers."""

    received_bytes = 0
    _most_bytes = MAX_HEAD_BYTES
    _interim_answers = 0
    transport: asyncio.Transport | None

    def begin(self, most_bytes: int) -> None:
        """Start the next answer."""
        self.received_bytes, self._most_bytes, self._interim_answers = 0, most_bytes, 0

    def data_received(self, data: bytes) -> None:  # noqa: D102
        if data and self.received_bytes == 0 and data[: len(_HTTP)] != _HTTP[: len(data)]:
            self._refuse(BadStatusLine(repr(data[:50])))
            return
        self.received_bytes += len(data)
        if self.received_bytes > self._most_bytes:
            self._refuse(HTTPException(f"an answer of more than {self._most_bytes} bytes, with its heads and trailers"))
            return
        super().data_received(data)

    def feed_data(self, data: Any, *size: int) -> None:  # noqa: D102
        self._interim_answers += data[0].code < 200
        if self._interim_answers > MAX_INTERIM_ANSWERS:
            self._refuse(HTTPException(f"more than {MAX_INTERIM_ANSWERS} interim answers"))
        else:
            super().feed_data(data, *size)

    def _refuse(self, error: Exception) -> None:
        self.set_exception(error)
        if self._payload is not None:
            self._payload.set_exception(error)
        if self.transport is not None:
            self.transport.abort()


def origin_of(url: str) -> str:
    """Return ``scheme://host:port`` of a URL."""
    return "/".join(url.split("/", 3)[:3])
