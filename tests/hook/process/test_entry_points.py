"""A Python entry point that starts the training by ``subprocess``: SIGTERM to it alone does not cost the last steps."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hook.job import HOOKED, Answers, Training, finished, marker, training
from tests.process.sidecar_process import until
from tests.processes import children_of

TRAINER = """
import sys, time
from trainer_hook.plain import latest, save, stopping
latest()
for step in range(1, 301):
    print(f"rank 0 step {step}", flush=True)
    time.sleep(0.05)
    if stopping():
        def write(folder):
            time.sleep(SAVE_S)
            (folder / "state").write_text(str(step))
        assert save(step, write)
        sys.exit(143)
"""
RUN = "import subprocess, sys\nprint('up', flush=True)\nsys.exit(subprocess.run(COMMAND, check=False).returncode)\n"
HEAVY = "from trainer_hook.process.session import current_session\ncurrent_session()\n"
"""What the import of a library does under the hook."""
IMPATIENT = "from trainer_hook.process import signals\nsignals._IDLE_EXIT_S = 0.1\n"


def trainer(*, save_s: float = 0.0) -> list[str]:
    return [sys.executable, "-c", TRAINER.replace("SAVE_S", str(save_s))]


def entry(command: list[str], before: str = "") -> list[str]:
    """Return an entry point that runs a command."""
    return [sys.executable, "-c", before + RUN.replace("COMMAND", repr(command))]


def assert_saved_just_in_time(ended: Training) -> None:
    last = ended.steps()[-1]
    assert finished(ended.volume) == [f"checkpoint-{last}"], ended.log()
    assert marker(ended.volume, f"checkpoint-{last}")["reason"] == "jit"
    assert last < 100, "it has stopped at the signal"


@pytest.mark.parametrize("to_group", [False, True], ids=["alone", "group"])
def test_an_entry_point_with_the_hook_waits_for_the_training_that_it_runs(
    to_group: bool, volume: Path, answers: Answers
) -> None:
    with training(entry(trainer(save_s=1), HEAVY + IMPATIENT), volume, answers.settings) as running:
        running.at_step(5)
        if to_group:
            os.killpg(running.process.pid, signal.SIGTERM)
            assert running.wait() == 143, running.log()
        else:
            assert running.terminate() == 143, running.log()
        assert_saved_just_in_time(running)


def test_so_it_does_with_a_shell_in_between_and_after_more_signals(volume: Path, answers: Answers) -> None:
    shell = ["sh", "-c", '"$@"; true', "sh", *trainer(save_s=1)]
    with training(entry(shell, HEAVY), volume, answers.settings) as running:
        running.at_step(5)
        for _ in range(3):
            running.process.send_signal(signal.SIGTERM)
            time.sleep(0.02)
        assert running.terminate() == 143, running.log()
        assert_saved_just_in_time(running)


def test_its_own_handler_decides_and_the_hook_does_not_end_it_during_the_save(volume: Path, answers: Answers) -> None:
    handler = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: print('theirs', flush=True))\n"
    with training(entry(trainer(save_s=1), HEAVY + IMPATIENT + handler), volume, answers.settings) as running:
        running.at_step(5)
        assert running.terminate() == 143, running.log()
        assert "theirs\n" in running.log()
        assert_saved_just_in_time(running)


def test_a_child_that_does_not_train_is_not_waited_for(volume: Path, answers: Answers) -> None:
    with training(entry(["sleep", "60"], HEAVY), volume, answers.settings) as running:
        running.said("up\n")
        began_s = time.monotonic()
        assert running.terminate() == 143, running.log()
        assert time.monotonic() - began_s < 5


def test_it_waits_no_longer_than_the_grace_period(volume: Path, answers: Answers) -> None:
    settings = answers.settings | {"CKPT_GRACE_SECONDS": "2"}
    with training(entry(trainer(save_s=60), HEAVY), volume, settings) as running:
        running.at_step(5)
        began_s = time.monotonic()
        assert running.terminate() == 143, running.log()
        assert 1.5 < time.monotonic() - began_s < 10
        assert finished(volume) == []


@pytest.fixture
def namespace() -> list[str]:
    """The command that makes another one PID 1 of a namespace."""
    command = ["unshare", "-Urpf", "--mount-proc", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no PID namespaces")
    return command


@pytest.mark.parametrize("before", ["", HEAVY], ids=["lean", "heavy"])
def test_so_it_is_where_it_is_pid_1_of_a_container(before: str, namespace: list[str], volume: Path, answers: Answers) -> None:
    within, command = [*namespace, sys.executable, *HOOKED], entry(trainer(save_s=1), before)
    with training(command, volume, answers.settings, hooked=False, within=within) as running:
        running.at_step(5)
        (first,) = until(lambda: children_of(running.process.pid))
        os.kill(first, signal.SIGTERM)
        assert running.wait() == 143, running.log()
        assert_saved_just_in_time(running)


def test_pid_1_ends_at_once_where_nothing_trains(namespace: list[str], volume: Path, answers: Answers) -> None:
    within = [*namespace, sys.executable, *HOOKED]
    with training(entry(["sleep", "60"]), volume, answers.settings, hooked=False, within=within) as running:
        running.said("up\n")
        (first,) = until(lambda: children_of(running.process.pid))
        began_s = time.monotonic()
        os.kill(first, signal.SIGTERM)
        assert running.wait() == 143, running.log()
        assert time.monotonic() - began_s < 5
