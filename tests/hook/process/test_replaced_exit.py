"""Libraries that replace ``sys.exit`` and ``sys.excepthook`` to learn how the script ends, as wandb does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hook.job import ROOT, Answers, plain_environ
from tests.hook.process.test_durable_wait import PREEMPTED, TRAINED
from tests.hook.process.test_signals import outcome
from trainer_hook.contract import parse_trainer_state

REPLACED = """
import atexit, sys
told = []
def learn(code=None, then=sys.exit):
    told.append(code)
    then(code)
sys.exit = learn
atexit.register(lambda: print("told", told, flush=True))
"""
REFUSES = """
def refuse(code=None):
    raise RuntimeError("not now")
sys.exit = refuse
"""


@pytest.mark.parametrize("ends", ["main thread", "other thread"])
def test_the_exit_code_of_a_preemption_is_told(ends: str, volume: Path, answers: Answers) -> None:
    """A run was shown as finished each time that its pod was preempted."""
    code = TRAINED + REPLACED
    if ends == "main thread":
        code += PREEMPTED + "finally:\n    pass"
    else:
        body = "\n".join(f"    {line}" for line in (PREEMPTED + "finally:\n    pass").strip().splitlines())
        code += f"def train():\n{body}\nimport threading, time\nthreading.Thread(target=train).start()\ntime.sleep(30)"
    environ = plain_environ() | {"PYTHONPATH": str(ROOT), "CKPT_DIR": str(volume)} | answers.settings
    start = "from trainer_hook.process import main_thread\nmain_thread.listen()\n"
    ended = subprocess.run([sys.executable, "-c", start + code], env=environ, capture_output=True, text=True)
    assert ended.returncode == 143, ended.stderr
    assert "told [143" in ended.stdout


def test_the_exit_code_after_a_signal_outside_training_is_told(volume: Path) -> None:
    code = REPLACED + "stop.install()\nprint('up', flush=True)\ntime.sleep(30)\n"
    assert outcome(code, volume, signalled=True) == (143, "up\ntold [143]\n")


def test_a_replacement_that_does_not_end_the_script_is_not_relied_on(volume: Path) -> None:
    code = REFUSES + "stop.install()\nprint('up', flush=True)\ntime.sleep(30)\n"
    assert outcome(code, volume, signalled=True) == (143, "up\n")


CHAINED = """
import traceback
def learn(kind, error, trace, then=sys.excepthook if sys.excepthook != sys.__excepthook__ else None):
    traceback.print_exception(kind, error, trace)
    if then is not None:
        then(kind, error, trace)
sys.excepthook = learn
session.outcome = None
raise ValueError("of the script")
"""


def test_an_error_that_a_library_prints_is_printed_once(volume: Path, answers: Answers) -> None:
    environ = plain_environ() | {"PYTHONPATH": str(ROOT), "CKPT_DIR": str(volume)} | answers.settings
    ended = subprocess.run([sys.executable, "-c", TRAINED + CHAINED], env=environ, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr.count("ValueError: of the script")) == (1, 1), ended.stderr
    assert parse_trainer_state((volume / ".ckpt/trainer.json").read_bytes()).state == "failed"
