"""HTTP for objects: connections that stay open, as few buffers as bodies, and an end at once when told to stop.

An HTTP library hands a body on in small pieces of fresh memory, several layers deep. Here a block goes from the file into a
buffer that fits the cache, is checked there, and leaves; the way back is the same. What is sent and what it means is not
decided here.
"""

from __future__ import annotations

import functools
import http.client
import select
import socket
import ssl
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from sidecar.store.slice import BLOCK_BYTES, FileSlice
from sidecar.store.wire_answer import Connection, OpenAnswer, read_head
from sidecar.store.wire_tls import TlsConnection

TINY_BYTES = 32 << 10
"""Bodies up to this size leave in one piece with their headers."""
MAX_ERROR_BYTES = 64 << 10
NOT_SENT_BYTES = 512 << 10
"""What the kernel holds at most of bytes that the link has not taken yet, per connection."""
WATCHED_BYTES = 2 << 20
"""While a body is sent, after so many bytes it is looked whether an answer is there already."""
_LOST = (BrokenPipeError, ConnectionResetError, ConnectionAbortedError, http.client.RemoteDisconnected)


class CannotConnect(OSError):
    """The text names the other side and says why."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request. ``url`` is absolute and quoted; ``headers`` hold everything but Host and Content-Length."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: FileSlice | bytes | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    content: bytes


def whole(answer: OpenAnswer, most: int | None = None) -> Answer:
    """Read an answer to its end, or ``most`` bytes of its content."""
    return Answer(answer.status, answer.headers, answer.read(most))


class Wire:
    """Thread-safe. Raises ``OSError`` and ``HTTPException`` for the network; what a body raises comes through unchanged.

    ``proxy_of`` says for ``http://host:port`` which proxy leads there, as a URL; ``stall_s`` is the longest wait for an answer
    and for a block to be taken (longer where the kernel took parts of the block).
    """

    def __init__(
        self,
        *,
        tls: ssl.SSLContext,
        connect_timeout_s: float,
        stall_s: float,
        proxy_of: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        self.stall_s = stall_s
        self._proxy_of = proxy_of
        self._lock = threading.Lock()
        self._idle: dict[str, list[Connection]] = {}
        self._busy: set[Connection] = set()
        self._closed = False
        self._keeps = True
        weakref.finalize(self, _close_idle, self._idle)
        self._buffers: list[memoryview] = []

    def exchange(self, request: Request) -> Answer:
        """Send a request with its body and return the whole answer."""
        with self.sent(request) as answered:
            return whole(answered())

    @contextmanager
    def sent(self, request: Request) -> Iterator[Callable[[], OpenAnswer]]:
        """Send a request with its body; what this yields waits for the answer. Others can be sent meanwhile.

        A connection whose answer was not read to its end is not used again.
        """
        exchange = _Exchange(self, request)
        try:
            exchange.send()
            yield exchange.answer
        finally:
            exchange.end()

    def retire(self) -> None:
        """Keep no connection any more; exchanges under way go on."""
        with self._lock:
            self._keeps = False
            _close_idle(self._idle)

    def close(self) -> None:
        """End every exchange at once; those that begin later fail, too."""
        self.retire()
        with self._lock:
            self._closed = True
            busy = list(self._busy)
        for connection in busy:
            _shut(connection)

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
        answers, unwatched_bytes = _Watcher(connection), WATCHED_BYTES
        with self._buffer() as buffer:
            while count := body.readinto(buffer):
                if unwatched_bytes >= WATCHED_BYTES:
                    unwatched_bytes = 0
                    if answers.early():
                        raise ConnectionResetError("answered before all was sent")
                connection.sendall(buffer[:count])
                unwatched_bytes += count

    def head(self, origin: str, target: str, request: Request) -> bytes:
        """Return what goes before the body."""
        if origin.startswith("http:") and self._proxy_of(origin):
            target = request.url
        lines = [f"{request.method} {target} HTTP/1.1", f"Host: {host_of(origin)}"]
        lines += [f"{name}: {value}" for name, value in request.headers.items()]
        if request.body is not None:
            lines.append(f"Content-Length: {len(request.body)}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    @contextmanager
    def _buffer(self) -> Iterator[memoryview]:
        """Lend the block of memory that was used last: a cache may still hold it."""
        with self._lock:
            buffer = self._buffers.pop() if self._buffers else memoryview(bytearray(BLOCK_BYTES))
        try:
            yield buffer
        finally:
            with self._lock:
                self._buffers.append(buffer)

    def dial(self, origin: str) -> Connection:
        """Return a new connection, which has to be given back.

        Raises:
            CannotConnect, TimeoutError: The text says to where, and why.
        """
        parts, proxy = urlsplit(origin), self._proxy_of(origin)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        to = urlsplit(proxy) if proxy else None
        first = (to.hostname or "", to.port or 80) if to else (host, port)
        # http.client knows how to ask a proxy for a tunnel, and nothing else is taken from it.
        plain = http.client.HTTPConnection(*first, timeout=self._connect_timeout_s)
        if to and parts.scheme == "https":
            plain.set_tunnel(host, port)
        try:
            plain.connect()
        except OSError as error:
            where = f"the proxy {first[0]}:{first[1]}" if to else origin  # a proxy's URL may hold a password
            raise CannotConnect(f"{where}: {error.strerror or error}") from None
        dialled: socket.socket = plain.sock
        try:
            dialled.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                # What the kernel was given cannot be held any more: it gets what the link takes, and little ahead.
                dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOT_SENT_BYTES)
            tls = TlsConnection(dialled, self._tls, server_hostname=host) if parts.scheme == "https" else None
            _let_the_kernel_wait(dialled, self.stall_s)
        except TimeoutError:
            dialled.close()
            raise TimeoutError(f"{origin}: connected, but TLS was not agreed on; is this an https port?") from None
        except BaseException:
            dialled.close()
            raise
        connection = tls or dialled
        self._lend(connection)
        return connection

    def _lend(self, connection: Connection) -> None:
        with self._lock:
            self._busy.add(connection)
            closed = self._closed
        if closed:
            self.give_back("", connection, kept=False)
            raise ConnectionAbortedError("the connections were closed")

    def take_idle(self, origin: str) -> Connection | None:
        """Return a connection that was kept, as far as is known still open; it has to be given back."""
        while True:
            with self._lock:
                idle = self._idle.get(origin)
                if not idle:
                    return None
                connection = idle.pop()
            if _Watcher(connection).readable():  # closed by the server, or out of step
                connection.close()
                continue
            self._lend(connection)
            return connection

    def give_back(self, origin: str, connection: Connection, *, kept: bool) -> None:
        """Keep a connection for the next request, or close it."""
        with self._lock:
            self._busy.discard(connection)
            if kept and self._keeps:
                self._idle.setdefault(origin, []).append(connection)
                return
        connection.close()


class _Exchange:
    """One request and its answer: over an open connection, or over a new one where that was closed and nothing answered."""

    def __init__(self, wire: Wire, request: Request) -> None:
        self.origin, target = _split(request.url)
        self._wire = wire
        self._request = request
        self._head = wire.head(self.origin, target, request)
        self._connection: Connection | None = None
        self._is_new = False
        self._answer: OpenAnswer | None = None

    def send(self) -> None:
        """Let all of the request leave."""
        with self._patiently():
            connection = self._wire.take_idle(self.origin)
            if connection is not None:
                with suppress(*_LOST):  # the server closed it meanwhile: nothing was answered, a new connection will tell
                    return self._send_over(connection)
            return self._send_anew()

    def answer(self) -> OpenAnswer:
        """Wait for the head of the answer."""
        if self._answer is None:
            with self._patiently():
                try:
                    self._answer = self._read_head()
                except _LOST:
                    if self._is_new:
                        raise
                    self._send_anew()
                    self._answer = self._answer or self._read_head()
        return self._answer

    def end(self) -> None:
        """Give the connection back."""
        if self._connection is not None:
            kept = self._answer is not None and self._answer.leaves_connection_usable
            self._wire.give_back(self.origin, self._connection, kept=kept)
            self._connection = None

    @contextmanager
    def _patiently(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:  # it is the kernel that waits
            raise TimeoutError(f"{self.origin}: nothing came or left for {self._wire.stall_s:g} s") from None

    def _send_anew(self) -> None:
        self.end()
        self._is_new = True
        self._send_over(self._wire.dial(self.origin))

    def _send_over(self, connection: Connection) -> None:
        self._connection = connection
        try:
            self._wire.send_over(connection, self._head, self._request.body)
        except (BrokenPipeError, ConnectionResetError):
            # Refused before all of the body was there: the reason can still be read.
            self._answer = self._read_head()
            self._answer.end_connection()

    def _read_head(self) -> OpenAnswer:
        assert self._connection is not None
        return read_head(self._connection, self._request.method)


class _Watcher:
    """Looks, without waiting, whether the other side said something."""

    def __init__(self, connection: Connection) -> None:
        self._tls = connection if isinstance(connection, TlsConnection) else None
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def readable(self) -> bool:
        return bool(self._poll.poll(0)) or (self._tls is not None and self._tls.has_unread)

    def early(self) -> bool:
        """Whether an answer came while a body is sent. Not known over TLS, where session tickets come at any time."""
        return self._tls is None and self.readable()


def _split(url: str) -> tuple[str, str]:
    """Return ``scheme://host:port`` of an absolute URL, and the rest."""
    slash = url.index("/", url.index("://") + 3)
    return url[:slash], url[slash:]


@functools.lru_cache
def host_of(origin: str) -> str:
    """Return the Host header as a signature counts it: without a port that goes without saying."""
    parts = urlsplit(origin)
    usual = {"http": 80, "https": 443}[parts.scheme]
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
    return host if parts.port in (None, usual) else f"{host}:{parts.port}"


def _close_idle(idle: dict[str, list[Connection]]) -> None:
    while idle:
        for connection in idle.popitem()[1]:
            connection.close()


def _let_the_kernel_wait(connection: socket.socket, longest_s: float) -> None:
    """Do what a timeout does, without asking before each call whether it would block: two system calls become one.

    What then takes too long is a ``BlockingIOError``.
    """
    connection.settimeout(None)
    timeval = struct.pack("@ll", int(longest_s), int(longest_s % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)


def _shut(connection: Connection) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
