"""TLS with many records per system call.

OpenSSL on a socket makes one system call per record of 16 KiB sent, and two per record received; they cost as much as the
encryption. Here OpenSSL works on memory buffers, and the socket sends and receives whole blocks.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import TypeVar

from sidecar.store.http.link import Link

T = TypeVar("T")

RECEIVE_BYTES = 128 << 10
"""Maximum bytes received before they are decrypted: with their copies they fit into a core's cache."""


class TlsConnection:
    """TLS over a connected socket, with the part of the socket interface that an HTTP client needs.

    One thread at a time, except for ``shutdown``. All methods and the constructor raise ``OSError``. An EOF without
    close_notify counts as EOF: the length of a body tells whether it is complete. The encryption buffer grows to the largest
    block sent, and keeps that size.
    """

    def __init__(self, connection: Link, context: ssl.SSLContext, *, server_hostname: str) -> None:
        """Do the handshake.

        Raises:
            ssl.SSLCertVerificationError: The certificate is not trusted, or belongs to another host.
        """
        self.link = connection
        self._connection = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_hostname)
        self._read: Callable[[int, memoryview], int] = self._tls.read  # type: ignore[assignment]  # typeshed: bytearrays only
        self._received = memoryview(bytearray(RECEIVE_BYTES))
        self._complete(self._tls.do_handshake)

    def sendall(self, data: bytes | memoryview) -> None:
        """Send all of ``data``."""
        left = memoryview(data)
        while left:
            left = left[self._complete(self._tls.write, left) :]

    def recv(self, size_bytes: int) -> bytes:
        """Wait for bytes and return up to ``size_bytes`` of them; empty at EOF."""
        buffer = bytearray(size_bytes)
        return bytes(buffer[: self.recv_into(memoryview(buffer))])

    def recv_into(self, buffer: memoryview, size_bytes: int = 0, flags: int = 0) -> int:
        """Fill the beginning of ``buffer`` and return the count; 0 at EOF.

        With ``MSG_WAITALL`` the whole buffer is filled, unless no byte arrives for a tick of the link.
        """
        filled, wanted = 0, size_bytes or len(buffer)
        while filled < wanted:
            try:
                count = self._read(wanted - filled, buffer[filled:wanted])  # one record at most
            except ssl.SSLWantReadError:
                if filled and not flags & socket.MSG_WAITALL:
                    break
                self._flush()
                if not filled:
                    self._receive()
                elif not self._receive_for_a_moment():
                    break
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                break
            else:
                if not count:
                    break
                filled += count
        return filled

    @property
    def has_unread(self) -> bool:
        """Whether received bytes wait to be read, here or in OpenSSL."""
        return self._incoming.pending > 0 or self._tls.pending() > 0

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """Set an option of the socket."""
        self._connection.setsockopt(level, option, value)

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._connection.fileno()

    def shutdown(self, how: int) -> None:
        """Shut the socket down, which interrupts the thread that uses it."""
        self._connection.shutdown(how)

    def close(self) -> None:
        """Close the socket."""
        self._connection.close()

    def _complete(self, call: Callable[..., T], *args: object) -> T:
        """Run a call of OpenSSL that may need bytes of the peer first, and send the bytes that it produced."""
        while True:
            try:
                result = call(*args)
            except ssl.SSLWantReadError:
                self._flush()
                self._receive()
            except ssl.SSLError:
                with contextlib.suppress(OSError):  # send the alert that names the reason
                    self._flush()
                raise
            else:
                self._flush()
                return result

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._connection.sendall(self._outgoing.read())

    def _receive(self) -> None:
        self._received_bytes(self._connection.recv_into(self._received))

    def _receive_for_a_moment(self) -> bool:
        try:
            self._received_bytes(self._connection.recv_a_moment(self._received))
        except BlockingIOError:
            return False
        return True

    def _received_bytes(self, count: int) -> None:
        if count:
            self._incoming.write(self._received[:count])
        else:
            self._incoming.write_eof()
