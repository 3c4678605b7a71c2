"""Training continues after an error of the hook; after SIGTERM it ends in time."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import mounts
from tests.hook.job import PATIENCE_S, Answers, finished, script, training
from tests.hook.story import example
from tests.ports import free_port
from tests.process.sidecar_process import until


@pytest.mark.slow
def test_sigterm_before_training_ends_the_script_at_once(volume: Path, answers: Answers) -> None:
    with training(script(before_s=60), volume, answers.settings) as running:
        running.said("made\n")
        assert running.terminate(timeout_s=30) == 143, running.log()
        assert running.steps() == []
        assert finished(volume) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [script(), example("train_torch.py"), example("train_lightning.py")], ids=["trainer", "loop", "lightning"]
)
def test_sigterm_during_the_resume_download_ends_the_script(command: list[str], volume: Path, answers: Answers) -> None:
    def still(asked: Any) -> Any:
        time.sleep(0.2)
        return 200, {"state": "downloading", "checkpoint": "checkpoint-7"}

    answers.by_call |= {"POST /v1/resume": still, "GET /v1/resume": still}
    with training(command, volume, answers.settings) as running:
        until(lambda: len(answers.asked) > 3, timeout_s=PATIENCE_S)
        assert running.terminate(timeout_s=30) == 143, running.log()
        assert running.steps() == []


@pytest.mark.slow
def test_sigterm_while_the_trainer_loads_its_checkpoint_ends_the_script(volume: Path, answers: Answers) -> None:
    """It waited for the first step, and for a save of that one."""
    with training(script(sleep_s=0.1), volume, answers.settings) as running:
        running.at_step(3)
        assert running.terminate() == 143, running.log()
    [saved] = finished(volume)
    answers.by_call["POST /v1/resume"] = (202, {"state": "ready", "checkpoint": saved, "source": "local"})
    slowly = [sys.executable, "-c", SLOW_LOAD, *script()[1:]]
    with training(slowly, volume, answers.settings) as running:
        running.said("loads\n")
        assert running.terminate(timeout_s=30) == 143, running.log()
        assert running.steps() == []


SLOW_LOAD = """
import runpy, sys, time
from transformers import Trainer
def load(*args, **kwargs):
    print("loads", flush=True)
    time.sleep(60)
Trainer._load_from_checkpoint = load
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_sigterm_during_the_download_of_the_best_model_ends_the_script(volume: Path, answers: Answers) -> None:
    """It waited for the download. The next pod fetches the best model, and leaves the final one."""
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
    best |= {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "greater_is_better": True}
    with training(script(args=best, sleep_s=0.1), volume, answers.settings) as running:
        running.at_step(5)
        assert running.terminate() == 143, running.log()
    newest = finished(volume)[-1]
    shutil.rmtree(running.work / "output")
    shutil.rmtree(volume / "checkpoint-2")

    def answer(asked: Any) -> Any:
        is_newest = asked is not None and asked["checkpoint"] == "latest"
        state = {"state": "ready", "checkpoint": newest, "source": "local"} if is_newest else {"state": "downloading"}
        time.sleep(0.2)
        return 200, state

    answers.by_call |= {"POST /v1/resume": answer, "GET /v1/resume": answer}
    with training(script(args=best), volume, answers.settings) as running:
        running.said("fetches checkpoint-2, the best model")
        assert running.terminate(timeout_s=30) == 143, running.log()
        assert finished(volume)[-1] == "checkpoint-6"
        assert "final" not in finished(volume)
        assert "WARNING" not in running.log()


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    with mounts.small_volume(tmp_path / "small", "2m") as folder:
        yield folder


@pytest.mark.slow
def test_a_full_volume_does_not_stop_training(small_volume: Path, answers: Answers) -> None:
    """Two saves of 0.8 MB fit; then others fill the volume to the last byte."""
    with training(
        script(args={"max_steps": 16}, width=6000, sleep_s=0.05), small_volume, answers.settings | {"CKPT_SAVE_STEPS": "3"}
    ) as running:
        running.at_step(7)
        with (small_volume / "other").open("wb", buffering=0) as other:
            try:
                while True:
                    other.write(b"x" * 512)
            except OSError:
                pass
        assert running.wait() == 0, running.log()
        assert running.steps()[-1] == 16
        assert {"checkpoint-3", "checkpoint-6"} <= set(finished(small_volume))
        assert "saves are skipped" in running.log()
        assert running.log().count("WARNING") <= 3, "told once, not at every step"
        assert "Traceback" not in running.log()
        unfinished = [p.name for p in small_volume.glob("checkpoint-*") if not (p / ".complete").exists()]
        assert unfinished == [], "half a checkpoint would only take the room of the next"


@pytest.mark.slow
def test_the_very_first_save_may_not_fit(small_volume: Path, answers: Answers) -> None:
    with training(
        script(args={"max_steps": 6}, width=60000), small_volume, answers.settings | {"CKPT_SAVE_STEPS": "3"}
    ) as running:
        assert running.wait() == 0, running.log()
        assert running.steps()[-1] == 6
        assert "saves are skipped" in running.log()
        assert "final could not be saved" in running.log(), "it is tried in any case"
        assert finished(small_volume) == []
        assert "Traceback" not in running.log()


@pytest.mark.slow
def test_without_any_sidecar_training_runs_and_a_signal_ends_the_wait_at_the_end(volume: Path) -> None:
    settings = {"CKPT_RESUME_TIMEOUT_S": "2", "CKPT_API_PORT": str(free_port())}
    with training(script(), volume, settings) as running:
        running.said("waiting until the last checkpoints")
        assert running.steps() == list(range(1, 21))
        assert "no sidecar answers" in running.log()
        assert set(finished(volume)) == {"final", "checkpoint-20"}
        began_s = time.monotonic()
        assert running.terminate(timeout_s=30) == 0, running.log()
        assert time.monotonic() - began_s < 20, "it waited on"
        assert "Traceback" not in running.log()
        assert "Exception ignored" not in running.log()
