"""A sidecar with nothing to do leaves the cores to the training."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.process.sidecar_process import sidecar, write_checkpoint

WATCHED_S = 3.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _switches(pid: int) -> int:
    """Return how often threads of a process were taken off a core, by themselves or by the kernel."""
    status = [Path(task, "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    lines = [line for text in status for line in text.splitlines() if "ctxt_switches" in line]
    return sum(int(line.split()[1]) for line in lines)


@pytest.mark.parametrize("more", [{}, {"CKPT_KEEP_STORE": "1"}], ids=["keeps-all", "retention"])
@pytest.mark.slow
def test_an_idle_sidecar_hardly_uses_the_cpu(more: dict[str, str], tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", {"CKPT_STORE": f"file://{tmp_path}/store"} | more) as running:
        write_checkpoint(tmp_path / "volume", "checkpoint-10", {"model.bin": bytes(1000)})
        running.ready().committed("checkpoint-10")
        time.sleep(1.0)
        pid = running.process.pid
        before_s, switches = _cpu_s(pid), _switches(pid)
        time.sleep(WATCHED_S)
        # A loop that never rests takes all of the core that it gets, also where others leave it only a tenth of one.
        assert _cpu_s(pid) - before_s < 0.1 * WATCHED_S
        assert _switches(pid) - switches < 300 * WATCHED_S
