"""``CKPT_ASYNC=1``: after a crash during a save, the resume is from a complete checkpoint and exact."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hook.activation.test_launcher_patches import ranks, torchrun
from tests.hook.conftest import pod
from tests.hook.job import Answers, Training, finished, marker, script, training
from tests.hook.versions import TRAINER_5
from tests.process.sidecar_process import until
from tests.processes import children_of, of_process, state_of
from trainer_hook.asynchronous import background
from trainer_hook.libraries.transformers import driver
from trainer_hook.process.settings import Settings

ASYNC = {"CKPT_ASYNC": "1", "CKPT_SAVE_STEPS": "3"}
WIDTH = 60_000
"""A checkpoint of 8 MB, three files in four of them."""


def writer_of(pid: int) -> int:
    """Return the process that writes for a training process, once it is there."""

    def found() -> list[int]:
        return [p for p in children_of(pid) if b"trainer_hook.asynchronous.writer" in of_process(p, "cmdline")]

    return int(until(found)[0])


def in_flight(running: Training) -> str | None:
    """Return a checkpoint whose small files are there and whose marker is not."""
    written: dict[str, float] = {}
    for state in running.volume.glob("checkpoint-*/trainer_state.json"):
        with suppress(FileNotFoundError):  # rotated away since
            written[state.parent.name] = state.stat().st_mtime
    names = [name for name in written if not (running.volume / name / ".complete").exists()]
    return max(names, key=written.__getitem__, default=None)


def stopped_in_mid_save(running: Training, pid: int | None = None) -> tuple[int, str]:
    """Stop the process that writes and wait until it has something to write. Returns its pid and the checkpoint."""
    writer = writer_of(pid or running.process.pid)
    os.kill(writer, signal.SIGSTOP)
    until(lambda: state_of(writer) == "T")
    name = None
    while name is None or in_flight(running) != name:  # what it had written gets its marker, on a busy machine late
        until(lambda: in_flight(running) is not None, timeout_s=60)
        name = in_flight(running)
        time.sleep(1)
    return writer, name


@pytest.mark.slow
@pytest.mark.timeout(300)  # four trainings, one after the other
def test_killed_in_mid_save_and_at_random_it_resumes_bit_for_bit(tmp_path: Path, unhooked: Callable[..., str]) -> None:
    told: dict[str, Any] = {"args": {"max_steps": 30}, "width": WIDTH, "quiet": True}
    volume, slowly = tmp_path / "volume", script(**told, sleep_s=0.1)
    with pod(volume, tmp_path / "store", {"CKPT_KEEP_LOCAL": "99"}) as (_, found):
        with training(slowly, volume, found | ASYNC) as first:
            first.said("saved checkpoint-3 (periodic")
            writer, torn = stopped_in_mid_save(first)
            first.process.kill()
            first.wait()
            until(lambda: state_of(writer) is None)
            assert torn not in finished(volume)
        with training(slowly, volume, found | ASYNC) as second:
            second.said("resumes from checkpoint-")
            second.said("training held for")
            after_s = random.uniform(0, 0.5)
            time.sleep(after_s)
            second.process.kill()
            print(f"killed {after_s:.3f} s after a save, the steps {second.steps()}")
            second.wait()
            assert second.steps()[0] == int(finished_before(torn, volume)) + 1
        with training(script(**told), volume, found | ASYNC) as third:
            assert third.wait() == 0, third.log()
            assert f"weights {third.weights()}" in unhooked(**told)
            assert third.steps()[0] > second.steps()[0]
            assert "WARNING" not in first.log() + second.log() + third.log()


def finished_before(name: str, volume: Path) -> str:
    """Return the step of the newest finished checkpoint before one."""
    steps = [int(n.removeprefix("checkpoint-")) for n in finished(volume) if n.startswith("checkpoint-")]
    return str(max(step for step in steps if step < int(name.removeprefix("checkpoint-"))))


@pytest.mark.slow
def test_a_killed_writer_is_one_warning_and_sigterm_waits_for_the_save_and_saves_again(volume: Path, answers: Answers) -> None:
    told = script(args={"max_steps": 400}, width=WIDTH, sleep_s=0.05)
    with training(told, volume, answers.settings | ASYNC | {"CKPT_SAVE_STEPS": "10"}) as running:
        writer, lost = stopped_in_mid_save(running)
        os.kill(writer, signal.SIGKILL)
        running.said(f"WARNING: {lost} could not be saved")
        running.said("(periodic")
        writer, waited_for = stopped_in_mid_save(running)
        running.process.send_signal(signal.SIGTERM)
        time.sleep(0.7)
        assert waited_for not in finished(volume)
        os.kill(writer, signal.SIGCONT)
        assert running.wait() == 143, running.log()
        last = f"checkpoint-{running.steps()[-1]}"
        assert last != waited_for
        reason = "jit" if f"saved {last} (jit" in running.log() else "periodic"  # the signal came in the save of that step
        assert reason == "jit" or running.steps()[-1] % 10 == 0
        assert running.log().index(f"saved {waited_for} (periodic") < running.log().index(f"saved {last} ({reason}")
        assert (marker(volume, waited_for)["reason"], marker(volume, last)["reason"]) == ("periodic", reason)
        assert lost not in finished(volume)
        assert not (volume / lost).exists()
        assert running.log().count("WARNING") == 1
        assert "Traceback" not in running.log()


@TRAINER_5
@pytest.mark.slow
def test_with_several_ranks_the_marker_comes_when_the_last_one_has_written(tmp_path: Path, answers: Answers) -> None:
    content = {}
    for mode in ("0", "1"):
        volume, settings = tmp_path / mode, answers.settings | ASYNC | {"CKPT_ASYNC": mode}
        with training(torchrun(width=WIDTH, sleep_s=0.2), volume, settings) as running:
            if mode == "1":
                until(lambda: len(ranks(running)) == 2)
                writer, name = stopped_in_mid_save(running, ranks(running)[0])
                until(lambda: (volume / name / "rng_state_1.pth").exists())  # noqa: B023
                running.at_step(int(name.removeprefix("checkpoint-")) + 2)
                assert name not in finished(volume)
                os.kill(writer, signal.SIGCONT)
            running.said("saved checkpoint-6 (periodic")
            until(lambda: "checkpoint-6" in finished(volume))  # noqa: B023
            running.close()
        folder = volume / "checkpoint-6"
        content[mode] = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".complete"}
        assert {"rng_state_0.pth", "rng_state_1.pth", "optimizer.pt"} <= {
            f["path"] for f in marker(volume, "checkpoint-6")["files"]
        }
    assert content["0"] == content["1"]


def trainer_with(**events: Any) -> Any:
    """Return what is asked of a Trainer, with a callback of the script."""
    library = type("Trainer", (), {"__module__": "transformers.trainer"})()
    callback = type("Callback", (), events)()
    return SimpleNamespace(
        training_step=getattr(library, "training_step", None),
        optimizer="optimizer",
        control=SimpleNamespace(should_training_stop=False),
        callback_handler=SimpleNamespace(callbacks=[callback]),
    )


def test_the_copy_is_put_off_only_while_no_code_of_the_script_may_change_parameters() -> None:
    assert driver.overlapping_optimizer(trainer_with()) == "optimizer"
    assert driver.overlapping_optimizer(trainer_with(on_step_end=lambda self: None)) == "optimizer"
    assert driver.overlapping_optimizer(trainer_with(on_step_begin=lambda self: None)) is None
    ending = trainer_with()
    ending.control.should_training_stop = True
    assert driver.overlapping_optimizer(ending) is None, "the best model may be loaded now"
    own = trainer_with()
    own.training_step = lambda model, inputs: None
    assert driver.overlapping_optimizer(own) is None


@pytest.mark.parametrize("flag", ["is_fsdp_enabled", "is_deepspeed_enabled"])
def test_sharded_training_saves_as_before_and_says_so(flag: str, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = SimpleNamespace(**{flag: True})

    def background(asynchronous: bool) -> Any:
        session: Any = SimpleNamespace(settings=Settings(asynchronous=asynchronous))
        return driver.TrainerDriver(session, trainer, None).background()

    assert background(True) is None
    assert "saves block training" in capfd.readouterr().err
    assert background(False) is None
    assert capfd.readouterr().err == ""


@given(expected_s=st.floats(0, 1000), left_s=st.floats(-10, 1000), more_s=st.floats(0, 100))
def test_a_longer_time_never_makes_a_save_fit_less(expected_s: float, left_s: float, more_s: float) -> None:
    fits = background.fits(expected_s=expected_s, left_s=left_s)
    assert not fits or expected_s < left_s
    assert not fits or background.fits(expected_s=expected_s, left_s=left_s + more_s)
    assert fits or not background.fits(expected_s=expected_s + more_s, left_s=left_s)
