"""Asynchronous saves of loops: each is complete and consistent, or it is not a finished checkpoint."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hook.asynchronous.test_async_saves import writer_of
from tests.hook.job import ROOT, Answers, finished, plain_environ, training
from tests.hook.story import example, steps
from tests.hook.versions import SHARDS_ON_CPU
from tests.ports import free_port


@SHARDS_ON_CPU
@pytest.mark.slow
def test_what_goes_wrong_on_one_rank_goes_wrong_on_all_and_nobody_hangs(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_addr=127.0.0.1"]
    script = [f"--master_port={free_port()}", str(ROOT / "tests/hook/scripts/shards.py"), str(tmp_path)]
    environ = plain_environ() | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([*launcher, *script], env=environ, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stderr
    for name, like in (("asynchronous", "blocking"), ("mixed", "blocking-2"), ("again", "blocking-3")):
        for rank in range(2):
            file = f"sharded/__{rank}_0.distcp"
            assert (tmp_path / name / file).read_bytes() == (tmp_path / like / file).read_bytes()
        assert (tmp_path / name / "sharded/.metadata").is_file()


@pytest.mark.slow
def test_a_save_that_hangs_is_not_waited_for_until_the_process_is_killed(volume: Path, answers: Answers) -> None:
    grace_s = 8.0
    settings = answers.settings | {"CKPT_ASYNC": "1", "CKPT_SAVE_STEPS": "4", "CKPT_GRACE_SECONDS": f"{grace_s:g}"}
    told = example("train_torch.py", "--width", "50000", "--step-seconds", "0.1", "--epochs", "9")
    with training(told, volume, settings) as running:
        running.said("saved checkpoint-4 (periodic")
        writer = writer_of(running.process.pid)
        os.kill(writer, signal.SIGSTOP)
        seen: list[int] = []
        while seen != steps(running):  # until the next save waits for the one that hangs
            seen = steps(running)
            time.sleep(1.0)
        assert running.terminate(timeout_s=4 * grace_s) == 143, running.log()  # on a busy machine torch takes seconds to end
        [seconds] = re.findall(r"exits 143, ([0-9.]+) s after the notice", running.log())
        assert float(seconds) < grace_s
        assert "is still being written and cannot be waited for any longer" in running.log()
        assert "checkpoint-4" in finished(volume)
        assert "Traceback" not in running.log()
