"""The log at the end of a script: the facts about durability."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.hook.job import ROOT, Answers, plain_environ
from tests.hook.process.test_client import in_turn
from trainer_hook.contract import parse_trainer_state
from trainer_hook.process import durable_wait
from trainer_hook.process.client import Client, FlushResult
from trainer_hook.process.durable_wait import wait_until_durable

GOING_ON: Any = SimpleNamespace(notice_at_s=None)


def missing(name: str, state: str) -> tuple[int, Any]:
    return 504, {"title": "Not durable", "missing": [{"checkpoint": name, "state": state, "reason": "its files went away"}]}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_wait, "FLUSH_POLL_S", 0.05)


@pytest.mark.parametrize("state", ["lost", "given-up", "rejected"])
def test_what_was_lost_is_not_forgotten_by_a_later_flush(
    state: str, answers: Answers, volume: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers.by_call["POST /v1/flush"] = in_turn(missing("checkpoint-5", state), (200, {"durable": []}))
    told = wait_until_durable(Client(answers.url, volume), GOING_ON)
    assert told == f"checkpoint-5 ({state}, its files went away)"
    assert "everything is durable" not in capsys.readouterr().err


def test_what_was_lost_while_others_went_on_is_named_at_the_end(
    answers: Answers, volume: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = missing("checkpoint-5", "lost")
    both[1]["missing"].append({"checkpoint": "checkpoint-7", "state": "uploading", "reason": None})
    answers.by_call["POST /v1/flush"] = in_turn(
        both, missing("checkpoint-7", "uploading"), (200, {"durable": ["checkpoint-7"]})
    )
    assert wait_until_durable(Client(answers.url, volume), GOING_ON) == "checkpoint-5 (lost, its files went away)"
    said = capsys.readouterr().err
    assert "waiting until checkpoint-7 is durable" in said
    assert "WARNING: not durable: checkpoint-5 (lost, its files went away); everything else is" in said


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((), "everything is durable\n"),
        ((5,), "WARNING: everything that was saved is durable; not saved: checkpoint-5\n"),
        ((1, 2, 3, 4, 5), "is durable; not saved: checkpoint-1, checkpoint-2, checkpoint-3 and 2 more\n"),
    ],
)
def test_what_was_not_saved_is_named_at_the_end(
    steps: tuple[int, ...], said: str, answers: Answers, volume: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers.by_call["POST /v1/flush"] = (200, {"durable": []})
    failed = [f"checkpoint-{step}" for step in steps]
    assert wait_until_durable(Client(answers.url, volume), GOING_ON, failed) is None
    assert said in capsys.readouterr().err


def test_what_was_rejected_and_then_written_anew_is_durable(answers: Answers, volume: Path) -> None:
    mended = missing("checkpoint-5", "rejected")
    mended[1]["missing"].append({"checkpoint": "checkpoint-7", "state": "uploading", "reason": None})
    durable = (200, {"durable": ["checkpoint-5", "checkpoint-7"]})
    answers.by_call["POST /v1/flush"] = in_turn(mended, durable)
    assert wait_until_durable(Client(answers.url, volume), GOING_ON) is None


class Clock:
    """A sidecar on a simulated clock. ``answer`` returns what it answers a flush after that many seconds; a flush takes 5 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Callable[[float], dict[str, Any]]) -> None:
        self.now_s = 0.0
        self._answer = answer
        monkeypatch.setattr(durable_wait, "time", SimpleNamespace(monotonic=lambda: self.now_s))

    def flush(self, *, timeout_s: float) -> FlushResult:
        self.now_s += 5
        if self.now_s > 7200:
            raise TimeoutError
        return FlushResult(missing=({"checkpoint": "checkpoint-300"} | self._answer(self.now_s),))

    def degraded(self) -> None:
        return None


def told_by(monkeypatch: pytest.MonkeyPatch, answer: Callable[[float], dict[str, Any]]) -> tuple[str | None, float]:
    """Wait until durable. Returns the result of the wait and its length in seconds."""
    clock: Any = Clock(monkeypatch, answer)
    return wait_until_durable(clock, GOING_ON), clock.now_s


HELD = {"state": "finished", "reason": "node 0 does not hold the prefix"}


def test_what_stands_still_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told, after_s = told_by(monkeypatch, lambda now_s: HELD)
    assert told == (
        "checkpoint-300: nothing has changed for 10 minutes: checkpoint-300 is finished, node 0 does not hold the prefix"
    )
    assert after_s == pytest.approx(600, abs=10)
    assert capsys.readouterr().err.count("waiting until checkpoint-300 is durable") == 1


def test_retries_that_come_no_further_are_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(now_s: float) -> dict[str, Any]:
        failures, wait_s = divmod(now_s, 50)
        reason = f"model: Input/output error; failed {failures:.0f} times, tried again after 48 s: check the volume"
        waits = {"state": "finished", "reason": reason, "sent_bytes": 7}
        return waits if wait_s else {"state": "uploading", "sent_bytes": 3}

    told, after_s = told_by(monkeypatch, answer)
    assert "model: Input/output error" in str(told)
    assert after_s < 900


def test_what_comes_further_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    _, after_s = told_by(monkeypatch, lambda now_s: HELD | {"sent_bytes": min(now_s, 3000) // 500})
    assert after_s == pytest.approx(3600, abs=10)


def test_the_first_part_on_a_slow_link_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sending = {"state": "uploading", "reason": None, "sent_bytes": 0}
    _, after_s = told_by(monkeypatch, lambda now_s: sending if now_s < 3000 else HELD)
    assert after_s == pytest.approx(3600, abs=10)


EXITS = {
    "sys.exit(1)": True,
    "raise SystemExit(1)": True,
    "raise SystemExit('a message')": True,
    "raise SystemExit": False,
    "raise SystemExit(0)": False,
    "exit(3)": True,
    "class Own(SystemExit):\n    pass\nraise Own(4)": True,
    "try:\n    raise SystemExit(1)\nexcept SystemExit as error:\n    error.code = 0\n    raise": False,
    "sys.excepthook = lambda *error: None\nraise ValueError": True,
    "try:\n    raise ValueError\nexcept ValueError:\n    pass": False,
    "sys.exit('a message')": True,
    "exec('import sys; sys.exit(2)')": True,
    "sys.exit()": False,
    "sys.exit(0)": False,
    "pass": False,
    "try:\n    sys.exit(1)\nfinally:\n    print(end='')": True,
    "try:\n    sys.exit(1)\nexcept SystemExit as error:\n    assert (error.code, repr(error)) == (1, 'SystemExit(1)')": False,
    "import pickle\nassert pickle.loads(pickle.dumps(SystemExit(3))).code == 3": False,
    "exit_code.watch()\nsys.exit(1)": True,
    "import copy, pickle\ntry:\n    sys.exit()\nexcept SystemExit as e:\n    assert type(copy.copy(e)) is SystemExit": False,
    "def f():\n    try:\n        sys.exit(1)\n    except SystemExit:\n        pass\nf()": False,
    "import argparse\nargparse.ArgumentParser().parse_args(['--unknown'])": True,
    "import threading\nthread = threading.Thread(target=sys.exit, args=(1,))\nthread.start()\nthread.join()": False,
}


@pytest.mark.parametrize("code", EXITS, ids=lambda code: code.splitlines()[-1])
def test_the_exit_code_of_the_script_is_known_to_the_last_act(code: str) -> None:
    start = "import atexit, sys\nfrom trainer_hook.process import exit_code\nexit_code.watch()\n"
    start += "atexit.register(lambda: print('failed', exit_code.failed()))\n"
    ended = subprocess.run(
        [sys.executable, "-c", start + code], env=plain_environ() | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert ended.stdout == f"failed {EXITS[code]}\n", ended.stderr
    assert (ended.returncode != 0) == EXITS[code]


TRAINED = """
import os, sys
from types import SimpleNamespace
from trainer_hook.process.session import current_session
session = current_session()
session.world = SimpleNamespace(local_rank=0, size=1)
session.outcome = "succeeded"
"""


@pytest.mark.parametrize(
    ("last_line", "state"),
    [
        ("sys.exit(1)", "failed"),
        ("raise SystemExit(1)", "failed"),
        ("sys.excepthook = lambda *error: None; 1 / 0", "failed"),
        ("raise SystemExit(0)", "succeeded"),
        ("sys.exit(0)", "succeeded"),
        ("", "succeeded"),
    ],
)
def test_a_script_that_ends_with_an_error_after_training_has_not_succeeded(
    last_line: str, state: str, volume: Path, answers: Answers
) -> None:
    environ = plain_environ() | {"PYTHONPATH": str(ROOT), "CKPT_DIR": str(volume)} | answers.settings
    ended = subprocess.run([sys.executable, "-c", TRAINED + last_line], env=environ, capture_output=True, text=True)
    assert parse_trainer_state((volume / ".ckpt/trainer.json").read_bytes()).state == state, ended.stderr
    assert ("everything is durable" in ended.stderr) == (state == "succeeded")


PREEMPTED = """
from trainer_hook.process.preemption import exit_preempted
session.consensus = SimpleNamespace(all_agree=bool)
try:
    exit_preempted(session, 7)
"""


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ("finally:\n    pass", False),
        ("except SystemExit:\n    pass", True),
        ("except SystemExit:\n    sys.exit(0)", True),
        ("except SystemExit:\n    raise ValueError('interrupted')", True),
        ("finally:\n    raise ValueError('no model')", True),
    ],
)
def test_a_preempted_script_that_ends_in_another_way_is_preempted(
    rest: str, said: bool, volume: Path, answers: Answers
) -> None:
    """The Job was complete, or failed, although its training had only been interrupted."""
    environ = plain_environ() | {"PYTHONPATH": str(ROOT), "CKPT_DIR": str(volume)} | answers.settings
    ended = subprocess.run([sys.executable, "-c", TRAINED + PREEMPTED + rest], env=environ, capture_output=True, text=True)
    assert ended.returncode == 143, ended.stderr
    assert parse_trainer_state((volume / ".ckpt/trainer.json").read_bytes()).state == "preempted"
    assert ("exits 143: the script did not end with" in ended.stderr) == said


SAVED_BY_THE_SCRIPT = """
import os, threading
from trainer_hook.process.rank_consensus import World
from trainer_hook.process.session import session_of_saves
session = session_of_saves()
session.take_part(World(), "20260101T000000Z-aa")
session.outcome = "succeeded"
def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")
threading.Thread.start = refuse
"""


def test_the_end_of_a_script_is_waited_for_where_python_refuses_new_threads_at_exit(volume: Path, answers: Answers) -> None:
    """Python 3.12 and later, after saves by the script alone: the signals' thread was to start at exit."""
    environ = plain_environ() | {"PYTHONPATH": str(ROOT), "CKPT_DIR": str(volume)} | answers.settings
    ended = subprocess.run([sys.executable, "-c", SAVED_BY_THE_SCRIPT], env=environ, capture_output=True, text=True)
    assert "everything is durable" in ended.stderr
    assert "RuntimeError" not in ended.stderr


def test_a_signal_ends_the_wait_where_python_refuses_new_threads(volume: Path, answers: Answers) -> None:
    answers.by_call["POST /v1/flush"] = missing("checkpoint-5", "uploading")
    term_soon = """
from trainer_hook.process import durable_wait
from trainer_hook.process.preemption import exit_if_ranks_hang
session.stop.on_notice = lambda: exit_if_ranks_hang(session)
durable_wait.info = lambda text: os.kill(os.getpid(), 15)
"""
    environ = plain_environ() | {"PYTHONPATH": str(ROOT), "CKPT_DIR": str(volume)} | answers.settings
    command = [sys.executable, "-c", SAVED_BY_THE_SCRIPT + term_soon]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (volume / ".ckpt/terminating").exists()


TERM_AT_EXIT = """
import atexit, time
def close():
    os.kill(os.getpid(), 15)
    time.sleep(30)
atexit.register(close)
"""


@pytest.mark.parametrize("last_line", ["", "sys.exit(3)"])
def test_a_signal_during_another_librarys_function_at_exit_ends_the_process_as_preempted(
    last_line: str, volume: Path, answers: Answers
) -> None:
    """The interpreter reported our SystemExit with a traceback, ignored it, and ended with the script's exit code."""
    environ = plain_environ() | {"PYTHONPATH": str(ROOT), "CKPT_DIR": str(volume)} | answers.settings
    command = [sys.executable, "-c", TRAINED + TERM_AT_EXIT + last_line]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (143, "")
    assert parse_trainer_state((volume / ".ckpt/trainer.json").read_bytes()).state == "preempted"


WRITES_AT_EXIT = """
import atexit, io, time
class Terminated(io.RawIOBase):
    def writable(self):
        return True
    def write(self, block):
        os.kill(os.getpid(), 15)
        time.sleep(0)
        return len(block)
stream = sys.STREAM = io.TextIOWrapper(io.BufferedWriter(Terminated()))
atexit.register(print, "bye", file=stream, flush=True)
"""


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_signal_during_a_write_at_exit_ends_the_process_as_preempted(stream: str, volume: Path, answers: Answers) -> None:
    """Python refuses a flush inside a write: the exception was ignored, and the process ended with 0."""
    environ = plain_environ() | {"PYTHONPATH": str(ROOT), "CKPT_DIR": str(volume)} | answers.settings
    command = [sys.executable, "-c", TRAINED + WRITES_AT_EXIT.replace("STREAM", stream)]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (143, "")


IN_C_AT_EXIT = """
import atexit, hashlib, subprocess, threading
from trainer_hook.process import signals
signals._IDLE_EXIT_S = 0.2
def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")
def close():
    threading.Thread.start = refuse
    subprocess.Popen(["sh", "-c", f"sleep 0.5; kill {os.getpid()}"])
    hashlib.pbkdf2_hmac('sha256', b'x', b'y', 500_000_000)
atexit.register(close)
"""


def test_a_signal_during_c_code_at_exit_ends_the_process_where_python_refuses_new_threads(
    volume: Path, answers: Answers
) -> None:
    """Python 3.12, for example in a library that waits for other ranks: only SIGKILL ended it."""
    environ = plain_environ() | {"PYTHONPATH": str(ROOT), "CKPT_DIR": str(volume)} | answers.settings
    command = [sys.executable, "-c", TRAINED + IN_C_AT_EXIT]
    assert subprocess.run(command, env=environ, timeout=60).returncode == 143


RANK_THAT_IS_NOT_JOINED = """
import multiprocessing, os, signal, threading, time
from trainer_hook.process.session import current_session
from trainer_hook.volume import lease
def train(volume):
    def save(*_):
        time.sleep(1)
        os.write(2, b"saved")
        os._exit(143)
    signal.signal(signal.SIGTERM, save)
    lease.hold(volume, 0)
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(30)
session = current_session()
multiprocessing.get_context("fork").Process(target=train, args=(session.settings.dir,)).start()
"""


def test_a_signal_while_the_interpreter_waits_for_ranks_ends_it_after_them(volume: Path, answers: Answers) -> None:
    """It ended at once, and with 0: all of a container ends with its PID 1, and the Job was complete."""
    environ = plain_environ() | {"PYTHONPATH": str(ROOT), "CKPT_DIR": str(volume)} | answers.settings
    command = [sys.executable, "-c", RANK_THAT_IS_NOT_JOINED]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr[:5]) == (143, "saved"), "Python may tell of a finalizer that the signal interrupted"


WHILE_EXECUTORS_END = """
import concurrent.futures.thread, os, signal, threading, time
from trainer_hook.process.session import current_session
current_session()
threading._register_atexit(lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(20)))
"""


def test_a_signal_while_the_interpreter_ends_the_threads_of_executors_is_not_dropped(volume: Path, answers: Answers) -> None:
    """The main thread counts as alive then: its exception was ignored, and the process ended with 0."""
    environ = plain_environ() | {"PYTHONPATH": str(ROOT), "CKPT_DIR": str(volume)} | answers.settings
    command = [sys.executable, "-c", WHILE_EXECUTORS_END]
    began_s = time.monotonic()
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (143, "")
    assert time.monotonic() - began_s < 15
