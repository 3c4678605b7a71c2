"""A save on request, from the command to the commit, and the wait at the end of a job, with a real sidecar."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.hook.conftest import pod
from tests.hook.job import marker, script, training
from tests.process.sidecar_process import until

pytestmark = pytest.mark.slow


def test_training_goes_on_after_a_save_on_request_and_ends_when_it_is_asked_to_stop(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    # Most of the time is spent in evaluations, so that the request comes in the middle of one.
    arguments = {"max_steps": 500, "eval_strategy": "steps", "eval_steps": 2}
    command = script(args=arguments, sleep_s=0.05, eval_sleep_s=0.15)
    with pod(volume, tmp_path / "store") as (sidecar, found), training(command, volume, found) as running:
        running.at_step(3)
        saved = sidecar.command("save")
        assert saved.returncode == 0, saved.stderr + running.log()
        name = re.findall(r"(checkpoint-\d+) is durable", saved.stdout)[0]
        assert marker(volume, name)["reason"] == "manual"
        assert (tmp_path / "store" / name / ".complete").exists()
        step = running.steps()[-1]
        until(lambda: running.steps()[-1] > step + 1)
        stopped = sidecar.command("save", "--stop")
        assert stopped.returncode == 0, stopped.stderr + running.log()
        assert running.wait() == 143
        name = re.findall(r"(checkpoint-\d+) is durable", stopped.stdout)[0]
        assert marker(volume, name)["step"] == running.steps()[-1]


def test_a_spot_notice_ends_training_with_a_save_before_any_signal(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    command = script(args={"max_steps": 500}, sleep_s=0.1)
    with pod(volume, tmp_path / "store") as (sidecar, found), training(command, volume, found) as running:
        running.at_step(3)
        # What the sidecar does at a notice of the cloud.
        notice = volume / ".ckpt/terminating.tmp"
        notice.write_text('{"source": "spot"}')
        notice.rename(volume / ".ckpt/terminating")  # whole at once: an empty file is a notice of no source
        assert running.wait() == 143
        name = f"checkpoint-{running.steps()[-1]}"
        assert marker(volume, name)["reason"] == "jit"
        sidecar.committed(name)
        assert sidecar.status()["termination"]["source"] == "spot"


def test_at_the_end_of_a_job_the_trainer_waits_for_final_and_says_how_far_it_is(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    settings = {"CKPT_BANDWIDTH_LIMIT": "1500kB/s"}
    command = script(args={"max_steps": 3, "save_strategy": "no"}, width=100_000)
    with pod(volume, tmp_path / "store", settings) as (_, found), training(command, volume, found) as running:
        running.said("waiting until")
        assert re.search(r"waiting until .*\(\d+ of \d+ MB\).* (?:is|are) durable", running.log())
        assert running.process.poll() is None
        began_s = time.monotonic()
        assert running.wait() == 0
        assert "everything is durable" in running.log()
        assert (tmp_path / "store/final/.complete").exists()
        print(f"waited {time.monotonic() - began_s:.1f} s more")
