"""HTTP answers read from a connection: a head, and a body that is received directly into its reader's buffer.

``http.client`` parses a head with the e-mail parser. For two hundred small objects, that costs more than all else together.
"""

from __future__ import annotations

import math
import re
import socket
import time
from http.client import BadStatusLine, HTTPException, IncompleteRead, RemoteDisconnected

from sidecar.store.http.link import Link
from sidecar.store.http.tls import TlsConnection

Connection = Link | TlsConnection

RECEIVE_BYTES = 16 << 10
MAX_HEAD_BYTES = 64 << 10
MAX_LINE_BYTES = 4 << 10
"""Maximum length of the line that begins a chunk."""
MAX_INTERIM_ANSWERS = 64
"""Maximum number of 1xx answers before the final one. A server sends one "100 Continue", or repeats "102 Processing"."""
MAX_LENGTH_DIGITS = 18
"""Maximum digits of a Content-Length; a longer one is malformed."""
SWITCHING_PROTOCOLS = 101
_PROTOCOL = b"HTTP/1."
_END_OF_HEAD = re.compile(rb"\n\r?\n")
_STATUS_LINE = re.compile(r"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: [^\x00\n\v\f\r]*)?")
_INTERIM = re.compile(rb"HTTP/1\.[01] 1[0-9][0-9][^\n]*\n(?:[^\r\n][^\n]*\n)*\r?\n")
_INTERIM_STATUS = re.compile(rb"HTTP/1\.[01] 1")
_FOLDED = re.compile(r"\r?\n[ \t]+")
_FIELD = re.compile(r"([-!#$%&'*+.^_`|~0-9A-Za-z]+):[ \t]*([^\x00\s]+(?:[ \t]+[^\x00\s]+)*)?[ \t]*", re.ASCII)
"""RFC 9112, 5: no space before the colon, no control characters. A line that two programs read differently is no header."""
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[^\n]*)?[ \t]*")


class OpenAnswer:
    """An answer whose body is not read yet. Header names are in lower case; repeated headers are joined with a comma.

    The constructor and the reads raise ``OSError`` and ``HTTPException``.
    """

    def __init__(self, connection: Connection, head: str, rest: bytes, *, method: str) -> None:
        line, _, fields = head.partition("\n")
        matched = _STATUS_LINE.fullmatch(line.removesuffix("\r"))
        if matched is None:
            raise BadStatusLine(line[:200])
        self.status = int(matched[2])
        self.headers = _headers(fields)
        self._connection = connection
        self._rest = rest
        """Bytes received and not yet read by the caller."""
        persistence = self.headers.get("connection", "").lower()
        self._stays = "close" not in persistence if matched[1] == "1" else "keep-alive" in persistence
        self.is_chunked = self._is_chunked()
        self._left = self._length(method)
        """Bytes left of the body, or of the current chunk of a chunked body; ``None``: until the connection is closed."""
        self._in_chunk = False
        self.is_whole = self._left == 0 and not self.is_chunked
        """The body was read to its end. Without a length and without chunks, a closed connection counts as the end."""
        self.body_bytes = None if self.is_chunked else self._left
        """Length of the body by its head; ``None``: the head does not give it."""

    def _is_chunked(self) -> bool:
        text = self.headers.get("transfer-encoding")
        if text is None:
            return False
        if text.lower() != "chunked":
            raise HTTPException(f"Transfer-Encoding: {text[:50]}")
        if "content-length" in self.headers:  # a proxy on the way may frame it differently
            self._stays = False
        return True

    def _length(self, method: str) -> int | None:
        declared = self._declared()
        if method == "HEAD" or self.status < 200 or self.status in (204, 304):
            self.is_chunked = False
            return 0
        return 0 if self.is_chunked else declared

    def _declared(self) -> int | None:
        text = self.headers.get("content-length")
        if text is None:
            return None
        # Repeated Content-Length headers are accepted if they agree.
        length, *others = {part.strip(" \t") for part in text.split(",")}
        if others or not (length.isascii() and length.isdigit()) or len(length) > MAX_LENGTH_DIGITS:
            raise HTTPException(f"Content-Length: {text[:50]}")
        return int(length)

    @property
    def leaves_connection_usable(self) -> bool:
        """Whether the body was read to its end and the connection can be reused."""
        return self.is_whole and self._stays and not self._rest

    def end_connection(self) -> None:
        """Rule out that the connection is reused, whatever the head says."""
        self._stays = False

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill the beginning of ``buffer`` and return the count; 0 at EOF, also a premature one (see ``is_whole``)."""
        if not self.is_whole and self._left == 0:
            self._begin_chunk()
        if self.is_whole or not len(buffer):
            return 0
        room = buffer if self._left is None else buffer[: self._left]
        count = self._take(room)
        if self._left is None:
            self.is_whole, self._stays = count == 0, False
        else:
            self._left -= count
            self.is_whole = self._left == 0 and not self.is_chunked
        return count

    def read(self, most: int | None = None) -> bytes:
        """Return the rest of the body, at most ``most`` bytes of it; ``None``: all of it.

        Raises:
            IncompleteRead: The connection ended before the body did.
        """
        content, buffer = bytearray(), memoryview(bytearray(RECEIVE_BYTES))
        while most is None or len(content) < most:
            count = self.readinto(buffer if most is None else buffer[: most - len(content)])
            if not count:
                if not self.is_whole:
                    raise IncompleteRead(bytes(content))
                break
            content += buffer[:count]
        return bytes(content)

    def _take(self, buffer: memoryview) -> int:
        if not self._rest:
            return self._connection.recv_into(buffer, 0, socket.MSG_WAITALL if self._left is not None else 0)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def _begin_chunk(self) -> None:
        if self._in_chunk and self._line():
            raise HTTPException("a chunk is longer than its declared size")
        size = _CHUNK_SIZE.fullmatch(line := self._line())
        if size is None:
            raise HTTPException(f"malformed chunk size: {line[:50]!r}")
        self._left, self._in_chunk = int(size[1], 16), True
        if self._left == 0:
            self._pass_over_trailers()
            self.is_whole = True

    def _pass_over_trailers(self) -> None:
        passed_bytes = 0
        while line := self._line():
            if not _FIELD.fullmatch(line.decode("latin-1")):
                raise HTTPException(f"malformed trailer: {line[:50]!r}")
            passed_bytes += len(line)
            if passed_bytes > MAX_HEAD_BYTES:
                raise HTTPException(f"trailers of more than {MAX_HEAD_BYTES} bytes")

    def _line(self) -> bytes:
        while (end := self._rest.find(b"\n")) < 0:
            more = self._connection.recv(RECEIVE_BYTES)
            if not more or len(self._rest) > MAX_LINE_BYTES:
                raise IncompleteRead(self._rest[:50])
            self._rest += more
        line, self._rest = self._rest[: end + 1], self._rest[end + 1 :]
        if not line.endswith(b"\r\n"):
            raise HTTPException(f"a line of a chunked body without CRLF: {line[:50]!r}")
        return line[:-2]


class HeadReader:
    """Reads the head of an answer from a connection; interim (1xx) answers are skipped."""

    def __init__(self, connection: Connection, method: str) -> None:
        # Some servers send headers and body separately and wait for the ACK of the headers, which the kernel would delay.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        self._connection = connection
        self._method = method
        self._received = b""
        self._interim_answers = 0

    def read(self, within_s: float = math.inf) -> OpenAnswer:
        """Wait up to ``within_s`` seconds for the whole head, also if it trickles.

        Raises:
            BlockingIOError: The time is over; the call may be repeated and continues.
            RemoteDisconnected: The connection ended before the first byte.
            HTTPException: The bytes received are not the head of an HTTP answer.
        """
        began_s = time.monotonic()
        while True:
            while (end := _END_OF_HEAD.search(self._received)) is None:
                if time.monotonic() - began_s > within_s:
                    raise BlockingIOError
                more = self._connection.recv(RECEIVE_BYTES)
                if not more:
                    raise IncompleteRead(self._received) if self._received else RemoteDisconnected("closed without an answer")
                self._received += more
                if self._received[: len(_PROTOCOL)] != _PROTOCOL[: len(self._received)]:
                    raise BadStatusLine(repr(self._received[:50]))
                if len(self._received) > MAX_HEAD_BYTES:
                    raise HTTPException(f"a head of more than {MAX_HEAD_BYTES} bytes")
            head, self._received = self._received[: end.start()].decode("latin-1"), self._received[end.end() :]
            answer = OpenAnswer(self._connection, head, self._received, method=self._method)
            if answer.status >= 200:
                return answer
            if answer.status == SWITCHING_PROTOCOLS:
                raise HTTPException("101: the server switched to a protocol that was not requested")
            self._interim_answers += 1
            if self._interim_answers > MAX_INTERIM_ANSWERS:
                raise HTTPException(f"more than {MAX_INTERIM_ANSWERS} interim answers")


def begins_answer(received: bytes) -> bool:
    """Whether the bytes received begin another answer than interim (1xx) ones, which say that the body is wanted; or EOF."""
    rest = received
    while interim := _INTERIM.match(rest):
        rest = rest[interim.end() :]
    return not received or (len(rest) > len(b"HTTP/1.1 ") and not _INTERIM_STATUS.match(rest))


def _headers(fields: str) -> dict[str, str]:
    if "\n " in fields or "\n\t" in fields:
        fields = _FOLDED.sub(" ", fields)
    headers: dict[str, str] = {}
    for line in fields.split("\n") if fields else ():
        field = _FIELD.fullmatch(line.removesuffix("\r"))
        if field is None:
            raise HTTPException(f"malformed header: {line[:50]!r}")
        name, value = field[1].lower(), field[2] or ""
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers
