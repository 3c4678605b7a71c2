"""Servers with Nagle's algorithm, as Ceph RGW, send a small body only after the client's ACK of the head."""

from __future__ import annotations

import fcntl
import hashlib
import socket
import struct
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.store.s3.test_control import store_at

CONTENT = b"document"
HEAD = f'HTTP/1.1 200 OK\r\nContent-Length: {len(CONTENT)}\r\nETag: "{hashlib.md5(CONTENT).hexdigest()}"\r\n\r\n'.encode()
DELAYED_ACK_S = 0.04
"""Least time for which Linux delays an ACK."""
WARM_UP, MEASURED = 40, 20
"""The kernel acknowledges the first segments of a connection at once."""


def unacknowledged_bytes(connection: socket.socket) -> int:
    (left,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, b"\0" * 4))
    return int(left)


def answer(connection: socket.socket, waited_s: list[float]) -> None:
    with connection, suppress(OSError):
        while request := connection.recv(1 << 16):
            assert request.endswith(b"\r\n\r\n")
            connection.sendall(HEAD)
            began_s = time.monotonic()
            while unacknowledged_bytes(connection):
                time.sleep(0.001)
            waited_s.append(time.monotonic() - began_s)
            connection.sendall(CONTENT)


@contextmanager
def serving(waited_s: list[float]) -> Iterator[str]:
    """Yield the endpoint of a server that waits for the ACK of each head, and notes for how long."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    threading.Thread(target=answer, args=(connection, waited_s), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


def test_the_head_of_an_answer_is_acknowledged_at_once(credentials_dir: Path) -> None:
    waited_s: list[float] = []
    with serving(waited_s) as endpoint, store_at(endpoint, credentials_dir) as store:
        for _ in range(WARM_UP + MEASURED):
            assert store.get("document") == CONTENT
    assert min(waited_s[WARM_UP:]) < DELAYED_ACK_S / 2
