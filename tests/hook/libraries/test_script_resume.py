"""A script that looks for its own checkpoint on the volume finds the one that a new pod has to download first."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

import pytest

from tests.hook.job import SCRIPTS, Answers, training
from tests.process.sidecar_process import sidecar, write_checkpoint
from trainer_hook.contract import META_OWNER, SCRIPT_OWNED

LOOKS = [sys.executable, str(SCRIPTS / "script_saves.py"), "looks_for_its_checkpoint"]
DOWNLOADING = {"state": "downloading", "id": "1", "checkpoint": "checkpoint-10", "total_bytes": 10}


@pytest.mark.slow
def test_a_script_sees_its_checkpoint_in_a_new_pod(tmp_path: Path) -> None:
    settings = {"CKPT_STORE": f"file://{tmp_path}/store", "CKPT_RESUME": "on-demand"}
    with sidecar(tmp_path / "old-volume", settings) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-10", {"model": b"m"}, {"meta": {META_OWNER: SCRIPT_OWNED}})
        running.committed("checkpoint-10")
        assert running.terminate() == 0
    with sidecar(tmp_path / "volume", settings) as running:
        url = f"http://127.0.0.1:{running.up().port}"
        with training(LOOKS, running.volume, {"CKPT_SIDECAR_URL": url}) as script:
            assert script.wait() == 0, script.log()
            assert "rank 0 sees ['checkpoint-10']" in script.log()
            assert "checkpoint-10, which the script saved, is on the volume" in script.log()


@pytest.mark.slow
@pytest.mark.parametrize("meta", [{}, {META_OWNER: "hook"}])
def test_a_script_does_not_wait_for_a_checkpoint_that_the_hook_resumes(
    meta: dict[str, str], volume: Path, answers: Answers
) -> None:
    (volume / ".ckpt").mkdir(parents=True)
    lock = os.open(volume / ".ckpt/lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)  # as a sidecar does
    answers.by_call["POST /v1/resume"] = (202, DOWNLOADING | {"meta": meta})
    answers.by_call["GET /v1/resume/1"] = (200, DOWNLOADING | {"meta": meta})
    with training(LOOKS, volume, answers.settings) as script:
        assert script.wait() == 0, script.log()
        assert "rank 0 sees []" in script.log()
    os.close(lock)
    assert "POST /v1/resume" in [asked[0] for asked in answers.asked]


@pytest.mark.slow
def test_a_script_without_a_sidecar_waits_for_nothing(volume: Path, answers: Answers) -> None:
    with training(LOOKS, volume, answers.settings) as script:
        assert script.wait() == 0, script.log()
        assert "rank 0 sees []" in script.log()
    assert answers.asked == []
