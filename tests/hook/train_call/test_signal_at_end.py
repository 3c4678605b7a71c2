"""SIGTERM between the ranks' agreement that training has ended by itself and the return of ``train()``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hook.job import ROOT, Answers, finished, marker, plain_environ, trainer_state

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
call.defer_signals()
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
FAILS = (
    SCRIPT.partition("call.finish()")[0]
    + """
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0)
try:
    try:
        raise ConnectionError("a helper is gone")
    except Exception as error:
        call.failed(error)
        raise
except ConnectionError:
    print("caught")
time.sleep(0.2)
print("goes on")
"""
)
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
    ended = run(SCRIPT, before, after, volume, answers)
    assert (ended.returncode, ended.stdout) == outcome, ended.stderr
    assert set(finished(volume)) == {"checkpoint-1", "final"}
    assert trainer_state(volume)["state"] == "preempted"


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [
        ("", "", (143, "")),
        (HANDLER.format("sys.exit(9)"), "", (9, "")),
        ("", HANDLER.format("print('theirs')"), (0, "theirs\ncaught\ngoes on\n")),
    ],
    ids=["none", "below", "that returns"],
)
def test_so_it_has_where_training_ends_with_an_error(
    before: str, after: str, outcome: tuple[int, str], volume: Path, answers: Answers
) -> None:
    """A script that catches the error went on until SIGKILL; another one ended with 1, which counts as a failure."""
    ended = run(FAILS, before, after, volume, answers)
    assert (ended.returncode, ended.stdout) == outcome, ended.stderr
    assert ("ConnectionError: a helper is gone" in ended.stderr) == (ended.returncode != 0)


IN_A_SAVE = """
import os, signal, time
from trainer_hook.process.session import current_session
from trainer_hook.train_call.driver import Driver
from trainer_hook.train_call.train_call import TrainCall
class Steps(Driver):
    global_step = 0
    def write(self, folder):
        folder.mkdir()
        (folder / "state").write_text("1")
        if self.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            FAILS
driver = Steps()
call = TrainCall(current_session(), driver)
call.defer_signals()
call.begin()
for driver.global_step in (1, 2, 3):
    print("step", driver.global_step)
    call.step_ended()
    call.request("periodic" if driver.global_step == 2 else None)
    call.save_pending()
"""


@pytest.mark.parametrize(
    ("fails", "reason"),
    [("pass", "periodic"), ("if not hasattr(self, 'was'): self.was = True; raise OSError('one error')", "jit")],
    ids=["that succeeds", "that fails"],
)
def test_in_a_save_it_ends_training_with_that_step(fails: str, reason: str, volume: Path, answers: Answers) -> None:
    """One more step was trained, and saved: there may be no time for two saves."""
    ended = run(IN_A_SAVE.replace("FAILS", fails), "", "", volume, answers)
    assert (ended.returncode, ended.stdout) == (143, "step 1\nstep 2\n"), ended.stderr
    assert finished(volume) == ["checkpoint-2"]
    assert marker(volume, "checkpoint-2")["reason"] == reason
    assert "goes on" not in ended.stderr


@pytest.mark.parametrize("step", [0, 3])
def test_while_the_checkpoint_is_loaded_it_ends_the_call_before_its_first_step(
    step: int, volume: Path, answers: Answers
) -> None:
    """Nothing is saved: the library has not restored all of its state yet."""
    loaded = f"os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.01); driver.global_step = {step}; call.begin()"
    ended = run(IN_A_SAVE.replace("FAILS", "pass").replace("call.begin()", loaded), "", "", volume, answers)
    assert (ended.returncode, ended.stdout) == (143, ""), ended.stderr
    assert finished(volume) == []
    assert "WARNING" not in ended.stderr
    assert (trainer_state(volume)["state"], trainer_state(volume)["step"]) == ("preempted", step)


def run(script: str, before: str, after: str, volume: Path, answers: Answers) -> subprocess.CompletedProcess[str]:
    environ = plain_environ() | {"PYTHONPATH": str(ROOT), "CKPT_DIR": str(volume)} | answers.settings
    command = [sys.executable, "-c", script.replace("BEFORE", before).replace("AFTER", after)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
