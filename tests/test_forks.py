"""A rank that is forked from a warm interpreter acts as one that torchrun starts."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forks import Forks, forks
from tests.process.sidecar_process import until
from tests.processes import state_of

WARM_RANK = Path(__file__).with_name("warm_rank")
SCRIPT = """
import os, signal, sys, time
if sys.argv[1] == "handles":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
print(os.getpid(), flush=True)
time.sleep(60 if sys.argv[1] != "ends" else 0)
sys.exit(5)
"""


@pytest.fixture(scope="module")
def warm() -> Iterator[Forks]:
    with forks("json") as warm:
        yield warm


def started(warm: Forks, path: Path, does: str) -> tuple[subprocess.Popen[bytes], int]:
    """Return what stands for the rank, and the rank's pid."""
    (path / "script.py").write_text(SCRIPT)
    log = path / "log"
    with log.open("wb") as output:
        command = [str(WARM_RANK), "-u", str(path / "script.py"), does]
        process = subprocess.Popen(command, env=dict(os.environ) | {"FORKS": warm.path}, stdout=output, start_new_session=True)
    return process, int(until(lambda: log.read_text().endswith("\n") and log.read_text()))


def test_it_ends_with_the_code_of_its_script(warm: Forks, tmp_path: Path) -> None:
    process, _ = started(warm, tmp_path, "ends")
    assert process.wait(10) == 5


@pytest.mark.parametrize(("does", "code"), [("handles", 7), ("sleeps", -signal.SIGTERM)])
def test_it_passes_a_signal_on_and_ends_as_the_rank(warm: Forks, tmp_path: Path, does: str, code: int) -> None:
    process, _ = started(warm, tmp_path, does)
    process.terminate()
    assert process.wait(10) == code


def test_where_it_is_killed_the_rank_is_killed(warm: Forks, tmp_path: Path) -> None:
    process, rank = started(warm, tmp_path, "handles")
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    until(lambda: state_of(rank) is None)
