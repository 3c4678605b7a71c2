"""Memory of a sidecar."""

from __future__ import annotations

from pathlib import Path

from tests.process.sidecar_process import Sidecar


def most_memory_mib(running: Sidecar) -> float:
    """Return the most memory that a sidecar has taken since its start, in MiB."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{running.process.pid}/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) / 1024
