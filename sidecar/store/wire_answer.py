"""HTTP answers as they come from a connection: a head, and a body that goes straight into its reader's buffer.

For two hundred small objects, what ``http.client`` does to a head (an e-mail's parser) costs more than all else together.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from http.client import BadStatusLine, HTTPException, IncompleteRead, RemoteDisconnected
from typing import TypeVar

from sidecar.store.wire_tls import TlsConnection

T = TypeVar("T")
Connection = socket.socket | TlsConnection

RECEIVE_BYTES = 16 << 10
MAX_HEAD_BYTES = 64 << 10
MAX_LINE_BYTES = 4 << 10
"""Of the line that begins a chunk."""
_PROTOCOL = b"HTTP/1."
_END_OF_HEAD = re.compile(rb"\r?\n\r?\n")
_STATUS_LINE = re.compile(r"HTTP/1\.([01]) +([1-9][0-9][0-9])(?: .*)?")
_FOLDED = re.compile(r"\r?\n[ \t]+")
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}")


class OpenAnswer:
    """An answer whose body is still on its way. Names of headers are in lower case; of several alike, one line.

    Raises ``OSError`` and ``HTTPException``, also while it is read.
    """

    def __init__(self, connection: Connection, head: str, rest: bytes, *, method: str) -> None:
        line, _, fields = head.partition("\n")
        told = _STATUS_LINE.fullmatch(line.rstrip("\r"))
        if told is None:
            raise BadStatusLine(line[:200])
        self.status = int(told[2])
        self.headers = _headers(fields)
        self._connection = connection
        self._rest = rest
        """Received and not handed on."""
        said = self.headers.get("connection", "").lower()
        self._stays = "close" not in said if told[1] == "1" else "keep-alive" in said
        self._chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        self._left = self._length(method)
        """Bytes left of the body, of a chunk where it comes in chunks; ``None``: until the connection is closed."""
        self._in_chunk = False
        self._ended = self._left == 0 and not self._chunked

    def _length(self, method: str) -> int | None:
        if method == "HEAD" or self.status in (204, 304):
            self._chunked = False
            return 0
        if self._chunked:
            return 0
        text = self.headers.get("content-length")
        if text is not None and not (text.isascii() and text.isdigit()):
            raise HTTPException(f"Content-Length: {text[:50]}")
        return None if text is None else int(text)

    @property
    def leaves_connection_usable(self) -> bool:
        """Whether the body was read to its end and another request may follow."""
        return self._ended and self._stays and not self._rest

    def end_connection(self) -> None:
        """The connection cannot be used again, whatever the head says."""
        self._stays = False

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill the beginning of ``buffer``; 0 at the end, and where the connection ended before."""
        if not self._ended and self._left == 0:
            self._begin_chunk()
        if self._ended or not len(buffer):
            return 0
        room = buffer if self._left is None else buffer[: self._left]
        count = self._take(room)
        if self._left is None:
            self._ended, self._stays = count == 0, False
        else:
            self._left -= count
            self._ended = self._left == 0 and not self._chunked
        return count

    def read(self, most: int | None = None) -> bytes:
        """Return the rest of the body, ``most`` bytes of it at most.

        Raises:
            IncompleteRead: The connection ended before.
        """
        content, buffer = bytearray(), memoryview(bytearray(RECEIVE_BYTES))
        while most is None or len(content) < most:
            count = self.readinto(buffer if most is None else buffer[: most - len(content)])
            if not count:
                if not self._ended:
                    raise IncompleteRead(bytes(content))
                break
            content += buffer[:count]
        return bytes(content)

    def _take(self, buffer: memoryview) -> int:
        if not self._rest:
            return self._receive(self._connection.recv_into, buffer, 0, socket.MSG_WAITALL if self._left is not None else 0)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def _receive(self, receive: Callable[..., T], *args: object) -> T:
        try:
            return receive(*args)
        except BlockingIOError:  # it is the kernel that waits
            raise TimeoutError("the rest of the answer does not come") from None

    def _begin_chunk(self) -> None:
        if self._in_chunk and self._line():
            raise HTTPException("a chunk is longer than it said")
        size = _CHUNK_SIZE.match(line := self._line())
        if size is None:
            raise HTTPException(f"size of a chunk: {line[:50]!r}")
        self._left, self._in_chunk = int(size[0], 16), True
        if self._left == 0:
            while self._line():  # trailers
                pass
            self._ended = True

    def _line(self) -> bytes:
        while (end := self._rest.find(b"\n")) < 0:
            more = self._receive(self._connection.recv, RECEIVE_BYTES)
            if not more or len(self._rest) > MAX_LINE_BYTES:
                raise IncompleteRead(self._rest[:50])
            self._rest += more
        line, self._rest = self._rest[:end], self._rest[end + 1 :]
        return line.rstrip(b"\r")


def read_head(connection: Connection, method: str) -> OpenAnswer:
    """Wait for the head of the answer to a request; interim answers are passed over.

    Raises:
        RemoteDisconnected: The connection ended and nothing had come.
        HTTPException: What came is no head.
    """
    # Some servers send headers and body apart and wait for the first to be acknowledged, which a kernel likes to delay.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
    received = b""
    while True:
        while (end := _END_OF_HEAD.search(received)) is None:
            more = connection.recv(RECEIVE_BYTES)
            if not more:
                raise IncompleteRead(received) if received else RemoteDisconnected("closed without an answer")
            received += more
            if received[: len(_PROTOCOL)] != _PROTOCOL[: len(received)]:
                raise BadStatusLine(repr(received[:50]))
            if len(received) > MAX_HEAD_BYTES:
                raise HTTPException(f"a head of more than {MAX_HEAD_BYTES} bytes")
        head, received = received[: end.start()].decode("latin-1"), received[end.end() :]
        answer = OpenAnswer(connection, head, received, method=method)
        if answer.status >= 200:
            return answer


def _headers(fields: str) -> dict[str, str]:
    if "\n " in fields or "\n\t" in fields:
        fields = _FOLDED.sub(" ", fields)
    headers: dict[str, str] = {}
    for line in fields.split("\n"):
        name, colon, value = line.partition(":")
        if colon:
            name, value = name.strip().lower(), value.strip()
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers
