"""Ports for what a test starts: outside the range that the kernel gives away, and no two tests of a run get the same.

Servers of the standard library, which take any free port, are ``served`` in a thread.
"""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from socketserver import BaseServer

FIRST = 15_000
PER_WORKER = 1_500
WORKERS = 11
"""Of pytest-xdist, or one without it beside ten."""

_taken = random.randrange(PER_WORKER)


def free_port(*, in_a_row: int = 1) -> int:
    """Return the first of ``in_a_row`` consecutive free ports that this process did not get recently."""
    global _taken
    for _ in range(PER_WORKER):
        port = _of_worker() + _taken % (PER_WORKER - in_a_row)
        _taken += in_a_row
        with ExitStack() as probes, suppress(OSError):
            for number in range(port, port + in_a_row):
                probes.enter_context(socket.create_server(("127.0.0.1", number)))
            return port
    raise RuntimeError(f"no free port in {_of_worker()}-{_of_worker() + PER_WORKER - 1}")


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


def _of_worker() -> int:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", f"gw{WORKERS - 1}").removeprefix("gw"))
    return FIRST + worker % WORKERS * PER_WORKER
