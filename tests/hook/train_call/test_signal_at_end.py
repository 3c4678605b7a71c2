"""SIGTERM between the ranks' agreement that training has ended by itself and the return of ``train()``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hook.job import ROOT, Answers, finished, plain_environ, trainer_state

SCRIPT = """
import os, signal, sys, time
BEFORE
from trainer_hook.process.session import current_session
from trainer_hook.train_call.driver import Driver
from trainer_hook.train_call.train_call import TrainCall
class OneStep(Driver):
    global_step = 1
    def write(self, folder):
        folder.mkdir()
        (folder / "state").write_text("1")
    write_final = write
session = current_session()
AFTER
call = TrainCall(session, OneStep())
call.hold_signals()
call.begin()
call.finish()
end = call.saver.end
def terminated():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0)
    end()
call.saver.end = terminated
call.end()
time.sleep(0.2)
print("goes on")
"""
HANDLER = "signal.signal(signal.SIGTERM, lambda *_: {})"


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [
        ("", "", (143, "")),
        (HANDLER.format("sys.exit(9)"), "", (9, "")),
        ("", HANDLER.format("sys.exit(9)"), (9, "")),
        ("", HANDLER.format("print('theirs')"), (0, "theirs\ngoes on\n")),
    ],
    ids=["none", "below", "over", "that returns"],
)
def test_it_has_the_effect_that_it_has_outside_training(
    before: str, after: str, outcome: tuple[int, str], volume: Path, answers: Answers
) -> None:
    """It was only recorded, and the script went on until SIGKILL. The names are those of the script's handler."""
    environ = plain_environ() | {"PYTHONPATH": str(ROOT), "CKPT_DIR": str(volume)} | answers.settings
    command = [sys.executable, "-c", SCRIPT.replace("BEFORE", before).replace("AFTER", after)]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == outcome, ended.stderr
    assert set(finished(volume)) == {"checkpoint-1", "final"}
    assert trainer_state(volume)["state"] == "preempted"
