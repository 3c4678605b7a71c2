"""HTTP as a proxy sees it: heads, bodies in blocks, and two ways to end a connection."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit

BLOCK_BYTES = 64 << 10
BUFFER_BYTES = 256 << 10
"""Of each socket: what lies in buffers counts as sent though the other side may never read it."""

_BY_QUERY = {
    ("POST", "uploads"): "CreateMultipartUpload",
    ("POST", "uploadId"): "CompleteMultipartUpload",
    ("POST", "delete"): "DeleteObjects",
    ("PUT", "partNumber"): "UploadPart",
    ("DELETE", "uploadId"): "AbortMultipartUpload",
    ("GET", "uploadId"): "ListParts",
    ("GET", "uploads"): "ListMultipartUploads",
    ("GET", "list-type"): "ListObjectsV2",
}
_BY_METHOD = {"GET": "GetObject", "HEAD": "HeadObject", "PUT": "PutObject", "DELETE": "DeleteObject", "POST": "PostObject"}


class Ended(OSError):
    """The other side closed the connection in the middle of a message."""


@dataclass
class Head:
    """First line and headers of a request or an answer, as they came."""

    first: str
    headers: list[tuple[str, str]]

    @classmethod
    def parse(cls, raw: bytes) -> Head:
        first, *lines = raw.decode("latin-1").split("\r\n")
        return cls(first, [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)])

    def encode(self) -> bytes:
        lines = [self.first, *(f"{name}: {value}" for name, value in self.headers)]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def get(self, wanted: str, default: str = "") -> str:
        return next((value for name, value in self.headers if name.lower() == wanted), default)

    def without(self, *names: str) -> Head:
        return Head(self.first, [(name, value) for name, value in self.headers if name.lower() not in names])

    @property
    def is_chunked(self) -> bool:
        return "chunked" in self.get("transfer-encoding").lower()

    @property
    def length(self) -> int | None:
        """Content-Length; None where there is none."""
        text = self.get("content-length")
        return int(text) if text else None

    @property
    def status(self) -> int:
        """Of an answer."""
        return int(self.first.split()[1])


class Request(Head):
    """A request's head in the words of S3. Buckets are addressed by path."""

    @property
    def method(self) -> str:
        return self.first.split()[0]

    @property
    def query(self) -> dict[str, str]:
        parsed = parse_qs(urlsplit(self.first.split()[1]).query, keep_blank_values=True)
        return {name: values[0] for name, values in parsed.items()}

    @property
    def key(self) -> str:
        return unquote(urlsplit(self.first.split()[1]).path).removeprefix("/").partition("/")[2]

    @property
    def part(self) -> int | None:
        return int(self.query["partNumber"]) if "partNumber" in self.query else None

    @property
    def operation(self) -> str:
        named = (name for (method, parameter), name in _BY_QUERY.items() if method == self.method and parameter in self.query)
        return next(named, _BY_METHOD.get(self.method, self.method))


class Peer:
    """One end of a connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = b""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _fill(self) -> bool:
        block = self._sock.recv(BLOCK_BYTES)
        self._buffer += block
        return bool(block)

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._buffer:
            if not self._fill():
                raise Ended(f"closed after {self._buffer[:80]!r}")
        before, _, self._buffer = self._buffer.partition(mark)
        return before

    def head(self) -> Head | None:
        """Return the next head; None when the other side closed between two messages."""
        if not self._buffer and not self._fill():
            return None
        return Head.parse(self._until(b"\r\n\r\n"))

    def answer(self) -> Head:
        """Return the next head that is not an interim one."""
        while head := self.head():
            if head.status >= 200:
                return head
        raise Ended("closed instead of an answer")

    def _exactly(self, size_bytes: int) -> Iterator[bytes]:
        while size_bytes:
            if not self._buffer and not self._fill():
                raise Ended(f"closed {size_bytes} bytes early")
            block, self._buffer = self._buffer[:size_bytes], self._buffer[size_bytes:]
            size_bytes -= len(block)
            yield block

    def _chunks(self) -> Iterator[bytes]:
        while size_bytes := int(self._until(b"\r\n").partition(b";")[0], 16):
            yield from self._exactly(size_bytes)
            self._until(b"\r\n")
        while self._until(b"\r\n"):
            pass

    def _rest(self) -> Iterator[bytes]:
        while self._buffer or self._fill():
            block, self._buffer = self._buffer, b""
            yield block

    def body(self, head: Head, *, to_the_end: bool = False) -> Iterator[bytes]:
        """Yield the body's bytes as they come. ``to_the_end``: of an answer, which may end with its connection."""
        if head.is_chunked:
            return self._chunks()
        if head.length is None and to_the_end:
            return self._rest()
        return self._exactly(head.length or 0)

    def send(self, content: bytes) -> None:
        self._sock.sendall(content)

    def close(self) -> None:
        """End the connection; also one that another thread is reading."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def reset(self) -> None:
        """End the connection with RST: what the other side has not read yet is lost."""
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()
