"""What is true of every sidecar under attack."""

from __future__ import annotations

import json
from pathlib import Path

from tests.process.sidecar_process import Sidecar


def most_memory_mib(running: Sidecar) -> float:
    """Return the most memory that a sidecar has taken since its start, in MiB."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{running.process.pid}/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) / 1024


def check_log(running: Sidecar) -> None:
    """Check that each line is one event, and that nothing in it reaches a terminal as more than text."""
    for line in running.log().splitlines():
        assert line.isprintable(), line
        assert isinstance(json.loads(line), dict)
    assert not running.events("service_failed")
    assert not running.events("upload_defect")
    assert "Traceback" not in running.log()
