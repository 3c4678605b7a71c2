"""Cost of a transfer, and its measurement for another process."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

LONGEST_S = 900.0
NOT_INSTALLED = 69
"""Exit code of a peer whose library or program is missing. Source: sysexits.h, EX_UNAVAILABLE."""


class Failed(Exception):
    """A client did not do its transfer; the text says why."""


@dataclass(frozen=True)
class Cost:
    """Cost of one transfer by one client."""

    cpu_s: float
    peak_rss_mib: float
    wall_s: float
    idle_rss_mib: float = 0.0
    """Peak before the transfer, of a process that was running already."""

    def beyond(self, start: Cost) -> Cost:
        """Return the cost without that of the start; the peak of memory is unchanged."""
        return Cost(max(self.cpu_s - start.cpu_s, 0.0), self.peak_rss_mib, max(self.wall_s - start.wall_s, 0.0))


def median(costs: Sequence[Cost]) -> Cost:
    """Return the median of each field by itself."""
    return Cost(*(statistics.median(getattr(cost, field.name) for cost in costs) for field in fields(Cost)))


def of_process(command: Sequence[str], environ: Mapping[str, str]) -> Cost:
    """Run a program to its end.

    A program whose last line of output is a ``Cost`` as JSON says itself what its transfer cost.

    Raises:
        Failed: It is not installed, ended with an error, or took too long.
    """
    with tempfile.TemporaryFile() as out:
        began_s = time.monotonic()
        process = subprocess.Popen(command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        killer = threading.Timer(LONGEST_S, process.kill)
        killer.start()
        _, status, used = os.wait4(process.pid, 0)
        wall_s = time.monotonic() - began_s
        killer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        last = (out.read().decode(errors="replace").strip().splitlines() or [""])[-1]
    if process.returncode == NOT_INSTALLED:
        raise Failed(last)
    if process.returncode:
        raise Failed(f"exit code {process.returncode}: {last[:150]}")
    if last.startswith('{"cpu_s"'):
        return Cost(**json.loads(last))
    return Cost(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, wall_s)
