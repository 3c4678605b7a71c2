"""Ports for what a test starts: outside the range that the kernel gives away, and no two tests get the same.

Servers of the standard library, which take any free port, are ``served`` in a thread.
"""

from __future__ import annotations

import fcntl
import functools
import os
import random
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from socketserver import BaseServer

FIRST = 15_000
PER_WORKER = 1_500
WORKERS = 11
"""Of pytest-xdist."""
FIRST_WITHOUT_WORKERS = 12_000
PER_PROCESS = 150
PROCESSES = 20
"""At the same time, without pytest-xdist: of a campaign, or several runs of pytest."""

_taken = random.randrange(PER_WORKER)
_held: list[int] = []
"""Descriptors of locks, which end with this process."""


def free_port(*, in_a_row: int = 1) -> int:
    """Return the first of ``in_a_row`` consecutive free ports that this process did not get recently."""
    global _taken
    first, count = _range()
    for _ in range(count):
        port = first + _taken % (count - in_a_row)
        _taken += in_a_row
        with ExitStack() as probes, suppress(OSError):
            for number in range(port, port + in_a_row):
                probes.enter_context(socket.create_server(("127.0.0.1", number)))
            return port
    raise RuntimeError(f"no free port in {first}-{first + count - 1}")


@contextmanager
def served(server: BaseServer) -> Iterator[None]:
    """Let a server answer in a thread, as a context, and close it afterwards."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@functools.cache
def _range() -> tuple[int, int]:
    """Return the first port of this process, and their number."""
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        return FIRST + int(worker.removeprefix("gw")) % WORKERS * PER_WORKER, PER_WORKER
    return FIRST_WITHOUT_WORKERS + _lowest_unlocked(PROCESSES) * PER_PROCESS, PER_PROCESS


def _lowest_unlocked(count: int) -> int:
    for number in range(count):
        fd = os.open(Path(tempfile.gettempdir()) / f"test-ports-{number}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            continue
        _held.append(fd)
        return number
    return count - 1
