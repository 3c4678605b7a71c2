"""A helper process that a trainer starts, in which the hook is active, too: it imports a library and does not train."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.hook.job import Answers, training

HELPER = """
import time
from trainer_hook.process.session import current_session
current_session()
print('helper up', flush=True)
time.sleep(60)
"""
TRAINER = """
import subprocess, sys, time
from trainer_hook.plain import latest, save, stopping
latest()
helper = subprocess.Popen(COMMAND, stdout=subprocess.PIPE)
for step in range(1, 31):
    print(f"rank 0 step {step}", flush=True)
    if step == 5:
        assert helper.stdout.readline() == b'helper up\\n'
        helper.terminate()
        print(f"helper ended with {helper.wait()}", flush=True)
    time.sleep(0.05)
    if stopping():
        sys.exit(143)
save(step, lambda folder: (folder / "state").write_text(str(step)))
"""
PYTHON = [sys.executable, "-c", HELPER]


@pytest.mark.parametrize(
    "command", [PYTHON, ["sh", "-c", '"$@" & trap "kill $!" TERM; wait; wait', "sh", *PYTHON]], ids=["alone", "shell"]
)
def test_a_helper_that_its_trainer_ends_does_not_end_training(command: list[str], volume: Path, answers: Answers) -> None:
    with training([sys.executable, "-c", TRAINER.replace("COMMAND", repr(command))], volume, answers.settings) as running:
        assert running.wait() == 0, running.log()
        assert "helper ended" in running.log()
        assert running.steps()[-1] == 30
        assert not (volume / ".ckpt/terminating").exists()
