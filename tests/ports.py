"""Ports for what a test starts: outside the range that the kernel gives away, and no two tests of a run get the same."""

from __future__ import annotations

import os
import random
import socket
from contextlib import ExitStack, suppress

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


def _of_worker() -> int:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", f"gw{WORKERS - 1}").removeprefix("gw"))
    return FIRST + worker % WORKERS * PER_WORKER
