"""HTTP transport for objects: a pool of kept-alive connections, one buffer per body in transfer, immediate stop on close.

An HTTP library copies a body in small, newly allocated pieces through several layers. Here a block is read from the file into a
buffer that fits the cache, is checksummed there and sent; a download takes the same way back. Contents of requests and the
meaning of answers are the callers' work.
"""

from __future__ import annotations

import functools
import http.client
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from sidecar.store.http.answer import Connection, OpenAnswer
from sidecar.store.http.dial import CannotConnect, Dialler
from sidecar.store.http.link import Pulse
from sidecar.store.http.proxy import HttpProxy, proxy_at
from sidecar.store.http.tries import Watcher
from sidecar.store.slice import BLOCK_BYTES, FileSlice

TINY_BYTES = 32 << 10
"""Bodies up to this size are sent in one call with their headers."""
MAX_ERROR_BYTES = 64 << 10
"""Maximum bytes read of an error answer; an error of S3 has about a thousand."""
MAX_ANSWER_BYTES = 32 << 20
"""Maximum length of a small answer, such as a listing. Some stores put ten thousand objects into one page."""
WATCHED_BYTES = 2 << 20
"""Bytes of a body after which the connection is polled for an early answer."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request. ``url`` is absolute and percent-encoded; ``headers`` hold everything but Host and Content-Length."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: FileSlice | bytes | None = None
    kind: str = ""
    """Key of the latency statistics; requests of one kind take about the same time."""
    silences: int = 0
    """Connections that already fell silent with this request; each makes the wait for the next one longer."""


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """A whole answer. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    says_where_it_ends: bool = True
    """``False``: its end is the end of the connection, so a truncated answer looks the same."""


class AnswerTooLong(http.client.HTTPException):
    """An answer that is longer than allowed. ``size_bytes``: its Content-Length, or ``None`` if it has none."""

    def __init__(self, headers: Mapping[str, str], size_bytes: int | None, most_bytes: int) -> None:
        super().__init__(f"an answer of {size_bytes or 'more'} bytes, {most_bytes} are expected at most")
        self.headers = headers
        self.size_bytes = size_bytes


def whole(answer: OpenAnswer, most_bytes: int = MAX_ANSWER_BYTES) -> WholeAnswer:
    """Read an answer to its end; of an error at most ``MAX_ERROR_BYTES``.

    Raises:
        AnswerTooLong: A success has more than ``most_bytes``.
    """
    ends = answer.is_chunked or answer.body_bytes is not None
    if answer.status >= 300:
        return WholeAnswer(answer.status, answer.headers, answer.read(MAX_ERROR_BYTES), ends)
    if (answer.body_bytes or 0) > most_bytes:
        raise AnswerTooLong(answer.headers, answer.body_bytes, most_bytes)
    content = answer.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise AnswerTooLong(answer.headers, None, most_bytes)
    return WholeAnswer(answer.status, answer.headers, content, ends)


class Wire:
    """Sends requests over a pool of connections. Thread-safe.

    Network failures raise ``OSError`` and ``HTTPException``; an exception of a body is passed on unchanged.

    Args:
        tls: Context of all TLS connections.
        connect_timeout_s: Deadline of the first connection attempt; it grows with failures (``core/schedule/hedging``).
        stall_s: Longest wait for an answer or for progress of a body, in seconds.
        proxy_of: Returns the proxy's URL for an origin such as ``http://host:port``; ``None``: no proxy.
    """

    def __init__(
        self,
        *,
        tls: ssl.SSLContext,
        connect_timeout_s: float,
        stall_s: float,
        proxy_of: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        self.pulse = Pulse(most_s=stall_s)
        self.proxy = functools.partial(_proxy, proxy_of)
        """Returns the proxy of an origin; ``None``: there is none. Raises ``CannotConnect`` if its URL is malformed."""
        self._dialler = Dialler(tls=tls, connect_timeout_s=connect_timeout_s, pulse=self.pulse, proxy_of=self.proxy)
        self._lock = threading.Lock()
        self._idle: dict[str, list[Connection]] = {}
        self._busy: set[Connection] = set()
        self._closed = False
        self._keeps = True
        weakref.finalize(self, _close_idle, self._idle)
        self._buffers: list[memoryview] = []

    def retire(self) -> None:
        """Close the idle connections and keep none from now on. Requests in flight continue."""
        with self._lock:
            self._keeps = False
            _close_idle(self._idle)

    def close(self) -> None:
        """Abort every request at once; later ones fail too."""
        self.retire()
        with self._lock:
            self._closed = True
            busy = list(self._busy)
        self._dialler.close()
        for connection in busy:
            connection.link.abandon()

    def send_over(self, connection: Connection, head: bytes, body: FileSlice | bytes | None) -> None:
        """Send a request over a connection."""
        if isinstance(body, bytes) or not body:
            connection.sendall(head + body if isinstance(body, bytes) else head)
            return
        if body.size_bytes <= TINY_BYTES:
            pieces = [head]
            body.each_block(lambda block: pieces.append(bytes(block)))
            connection.sendall(b"".join(pieces))
            return
        connection.sendall(head)
        body.seek(0)
        answers, unwatched_bytes = Watcher(connection), WATCHED_BYTES
        with self._buffer() as buffer:
            while count := body.readinto(buffer):
                if unwatched_bytes >= WATCHED_BYTES:
                    unwatched_bytes = 0
                    self.pulse.quiet.heard_s = time.monotonic()
                    if answers.early():
                        raise ConnectionResetError("answered before all was sent")
                connection.sendall(buffer[:count])
                unwatched_bytes += count

    def head(self, origin: str, target: str, request: Request) -> bytes:
        """Return the request line and the headers as bytes."""
        added = {"Accept-Encoding": "identity"}  # prevents proxies from compressing what is stored
        if origin.startswith("http:") and (proxy := self.proxy(origin)):
            target = request.url
            added |= proxy.headers
        lines = [f"{request.method} {target} HTTP/1.1", f"Host: {host_of(origin)}"]
        lines += [f"{name}: {value}" for name, value in (*request.headers.items(), *added.items())]
        if request.body is not None:
            lines.append(f"Content-Length: {len(request.body)}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    @contextmanager
    def _buffer(self) -> Iterator[memoryview]:
        """Lend the buffer that was used last, which may still be in the CPU's cache."""
        with self._lock:
            buffer = self._buffers.pop() if self._buffers else memoryview(bytearray(BLOCK_BYTES))
        try:
            yield buffer
        finally:
            with self._lock:
                self._buffers.append(buffer)

    def dial(self, origin: str, *, unless: Callable[[], bool] = lambda: False) -> Connection:
        """Return a new connection; the caller passes it to ``give_back``. Raises as ``Dialler.dial``."""
        connection = self._dialler.dial(origin, unless=unless)
        self._lend(connection)
        return connection

    def _lend(self, connection: Connection) -> None:
        with self._lock:
            self._busy.add(connection)
            self.pulse.connections = len(self._busy)
            closed = self._closed
        if closed:
            self.give_back("", connection, kept=False)
            raise ConnectionAbortedError("the connections were closed")

    def take_idle(self, origin: str) -> Connection | None:
        """Return an idle connection that looks open, or ``None``; the caller passes it to ``give_back``."""
        while True:
            with self._lock:
                idle = self._idle.get(origin)
                if not idle:
                    return None
                connection = idle.pop()
            if Watcher(connection).readable():  # closed by the server, or an unexpected answer
                connection.close()
                continue
            self._lend(connection)
            return connection

    def give_back(self, origin: str, connection: Connection, *, kept: bool) -> None:
        """Put a connection back into the pool (``kept``), or close it."""
        with self._lock:
            self._busy.discard(connection)
            self.pulse.connections = len(self._busy)
            if kept and self._keeps:
                self._idle.setdefault(origin, []).append(connection)
                return
        connection.close()

    def abandon(self, connection: Connection) -> None:
        """Reset a connection: bytes that were not sent yet are dropped."""
        connection.link.forget_queue()
        self.give_back("", connection, kept=False)

    def drop_idle(self, origin: str) -> None:
        """Close the idle connections to an origin, because one of them turned out to be dead."""
        with self._lock:
            idle = self._idle.pop(origin, [])
        for connection in idle:
            connection.close()


@functools.lru_cache
def host_of(origin: str) -> str:
    """Return the Host header as it is signed: without the scheme's default port."""
    parts = urlsplit(origin)
    usual = {"http": 80, "https": 443}[parts.scheme]
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
    return host if parts.port in (None, usual) else f"{host}:{parts.port}"


def _proxy(proxy_of: Callable[[str], str | None], origin: str) -> HttpProxy | None:
    url = proxy_of(origin)
    if not url:
        return None
    try:
        return proxy_at(url)
    except ValueError as error:
        raise CannotConnect(str(error)) from None


def _close_idle(idle: dict[str, list[Connection]]) -> None:
    while idle:
        for connection in idle.popitem()[1]:
            connection.close()
