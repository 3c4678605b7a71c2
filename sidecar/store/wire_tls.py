"""TLS, many records at a time.

OpenSSL on a socket makes a system call for each record of 16 KiB that it sends, and two for each that it receives; they cost as
much as the encryption. Here it works in memory, and the socket takes and gives whole blocks.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

RECEIVE_BYTES = 128 << 10
"""Received before it is decrypted, at most: with its copies it fits the cache of a core."""


class TlsConnection:
    """TLS over a connected socket: as much of a socket as an HTTP client needs.

    One thread at a time, but for ``shutdown``. Raises ``OSError``, also while it begins. An end without a farewell is an end:
    whether a body is whole is for its length to say. It keeps what the largest block that was sent needs when it is encrypted.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, *, server_hostname: str) -> None:
        """Agree with the server on everything.

        Raises:
            ssl.SSLCertVerificationError: The certificate is not trusted, or is another host's.
        """
        self._connection = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_hostname)
        self._read: Callable[[int, memoryview], int] = self._tls.read  # type: ignore[assignment]  # typeshed: bytearrays only
        self._received = memoryview(bytearray(RECEIVE_BYTES))
        self._complete(self._tls.do_handshake)

    def sendall(self, data: bytes | memoryview) -> None:
        """Send all of it."""
        left = memoryview(data)
        while left:
            left = left[self._complete(self._tls.write, left) :]

    def recv(self, size_bytes: int) -> bytes:
        """Return what is there, waiting for something; nothing at the end."""
        buffer = bytearray(size_bytes)
        return bytes(buffer[: self.recv_into(memoryview(buffer))])

    def recv_into(self, buffer: memoryview, size_bytes: int = 0, flags: int = 0) -> int:
        """Fill the beginning of ``buffer``: with ``MSG_WAITALL`` all of it, unless the end comes before. 0 at the end."""
        filled, wanted = 0, size_bytes or len(buffer)
        while filled < wanted:
            try:
                count = self._read(wanted - filled, buffer[filled:wanted])  # one record at most
            except ssl.SSLWantReadError:
                if filled and not flags & socket.MSG_WAITALL:
                    break
                self._flush()
                self._receive()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                break
            else:
                if not count:
                    break
                filled += count
        return filled

    @property
    def has_unread(self) -> bool:
        """Whether something was received that nobody has asked for, as a socket with something to read has."""
        return self._incoming.pending > 0 or self._tls.pending() > 0

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """Set an option of the socket."""
        self._connection.setsockopt(level, option, value)

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._connection.fileno()

    def shutdown(self, how: int) -> None:
        """End the socket under the thread that uses it."""
        self._connection.shutdown(how)

    def close(self) -> None:
        """Close the socket."""
        self._connection.close()

    def _complete(self, call: Callable[..., T], *args: object) -> T:
        """Do what may have to hear from the other side first, and let leave what came of it."""
        while True:
            try:
                result = call(*args)
            except ssl.SSLWantReadError:
                self._flush()
                self._receive()
            except ssl.SSLError:
                with contextlib.suppress(OSError):  # the other side is told why
                    self._flush()
                raise
            else:
                self._flush()
                return result

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._connection.sendall(self._outgoing.read())

    def _receive(self) -> None:
        if count := self._connection.recv_into(self._received):
            self._incoming.write(self._received[:count])
        else:
            self._incoming.write_eof()
