"""Training in another thread than the main one, and a library that is imported there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.hook.job import ROOT, SCRIPTS, Answers, finished, plain_environ, script, training
from trainer_hook.activation.run_command import INJECT
from trainer_hook.contract import parse_notice

WAITS = {
    "join": "thread.join()",
    "sleep": "import time; time.sleep(60)",
    "event": "threading.Event().wait()",
    "event loop": "import asyncio; asyncio.new_event_loop().run_forever()",
    "pipe": "import os; os.read(os.pipe()[0], 1)",
    "python": "while True: pass",
    "its end": "",
}
"""What the main thread does meanwhile."""

IMPORTS = """
import threading, time
def work():
    from trainer_hook.process.session import current_session
    session = current_session()
    {then}
thread = threading.Thread(target=work)
thread.start()
"""


@contextmanager
def python(code: str, volume: Path, **settings: str) -> Iterator[subprocess.Popen[str]]:
    environ = plain_environ() | {"CKPT_HOOK": "auto", "PYTHONPATH": os.pathsep.join((str(INJECT), str(ROOT)))}
    environ |= {"CKPT_DIR": str(volume)} | settings
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("wait", WAITS)
def test_sigterm_is_heard_although_the_library_was_imported_in_a_thread(wait: str, tmp_path: Path) -> None:
    code = IMPORTS.format(then="print('listens', flush=True); time.sleep(60)") + WAITS[wait]
    with python(code, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert parse_notice((tmp_path / ".ckpt/terminating").read_bytes()).source == "sigterm"


@pytest.mark.parametrize("wait", [*WAITS, "goes on"])
def test_a_training_that_is_preempted_in_a_thread_ends_the_process_as_preempted(wait: str, tmp_path: Path) -> None:
    then = (
        "from trainer_hook.process.preemption import exit_preempted; print('listens', flush=True); exit_preempted(session, 5)"
    )
    after = "thread.join(); print('went on', flush=True)" if wait == "goes on" else WAITS[wait]
    with python(IMPORTS.format(then=then) + after, tmp_path, CKPT_PREEMPTED_EXIT_CODE="77") as process:
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 77
    assert said == "listens\n"


def test_where_the_main_thread_cannot_be_asked_a_warning_says_what_ends_training(tmp_path: Path) -> None:
    taken = "import signal; signal.signal(signal.SIGRTMAX - 6, lambda *_: None)\n"
    with python(taken + IMPORTS.format(then="pass") + "thread.join()", tmp_path) as process:
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "only .ckpt/terminating is sure to be heard" in said


@pytest.mark.slow
def test_a_trainer_in_a_thread_saves_just_in_time_and_exits_143(volume: Path, answers: Answers) -> None:
    command = script(args={"max_steps": 200}, sleep_s=0.05)
    command[1] = str(SCRIPTS / "in_thread.py")
    with training(command, volume, answers.settings) as running:
        running.at_step(3)
        assert running.terminate() == 143, running.log()
        assert finished(volume) == [f"checkpoint-{running.steps()[-1]}"]
        assert "the main thread went on" not in running.log()
        assert "WARNING" not in running.log()


def test_a_forked_child_does_not_run_what_its_parent_was_asked_to(tmp_path: Path) -> None:
    code = """
import os, threading
from trainer_hook.process import main_thread
main_thread._asked.append(lambda: print("the parent's", flush=True))
if os.fork() == 0:
    asking = threading.Thread(target=main_thread.ask, args=(lambda: print("the child's", flush=True),))
    asking.start()
    asking.join()
    os._exit(0)
os.wait()
"""
    with python(code, tmp_path) as process:
        assert process.communicate(timeout=60)[0] == "the child's\n"


def test_one_that_raises_leaves_the_others_to_be_run(tmp_path: Path) -> None:
    """Training in a thread ends by such a one. Two signals during C code are one call of the handler."""
    code = """
import hashlib, threading
from trainer_hook.process import main_thread
def fails():
    raise RuntimeError
def ask():
    main_thread.ask(fails)
    main_thread.ask(lambda: done.append("the second"))
done = []
asking = threading.Thread(target=ask)
try:
    asking.start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)
    asking.join()
except RuntimeError:
    done.append("raised")
asking.join()
print(sorted(done))
"""
    with python(code, tmp_path) as process:
        assert process.communicate(timeout=60)[0] == "['raised', 'the second']\n"


def test_what_could_not_be_asked_is_asked_again(tmp_path: Path) -> None:
    """With the signal queue of the user full the first call failed, and the second one waited for its signal."""
    code = """
import resource, threading, time
from trainer_hook.process import main_thread
def ask():
    _, most = resource.getrlimit(resource.RLIMIT_SIGPENDING)
    asked = []
    for limit in (0, most):
        resource.setrlimit(resource.RLIMIT_SIGPENDING, (limit, most))
        asked.append(main_thread.ask(then))
    answers.append(asked)
answers, done = [], []
def then():
    done.append(True)
asking = threading.Thread(target=ask)
asking.start()
asking.join()
time.sleep(0.2)
print(answers, done)
"""
    with python(code, tmp_path) as process:
        assert process.communicate(timeout=60)[0] == "[[False, True]] [True]\n"
