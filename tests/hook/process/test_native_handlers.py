"""Handlers of SIGTERM that C code installs over the hook's: Python does not know of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hook.process.test_signals import outcome

TOLD = "a library has a handler of SIGTERM in C that hides the signal"
TRAIN = """
import faulthandler, ctypes
def install(function):
    ctypes.CDLL(None).signal(15, ctypes.c_void_p(function))
stop.install()
{before}
stop.defer()
{during}
stop._polled_s = 0.0
stop.noticed()
print('up', flush=True)
until = time.monotonic() + 5
while not stop.noticed() and time.monotonic() < until:
    time.sleep(0.01)
stop.end_deferral()
print('told', stop.notice_at_s is not None, flush=True)
"""
DUMPS, CHAINS, IGNORES = "faulthandler.register(15)", "faulthandler.register(15, chain=True)", "install(1)"


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize("handler", [DUMPS, CHAINS])
def test_a_traceback_at_sigterm_is_written_and_the_signal_is_noticed(handler: str, when: str, volume: Path) -> None:
    """``faulthandler.register`` without ``chain`` hid the signal: the job trained on until it was killed."""
    code, text = outcome(TRAIN.format(**{"before": "", "during": "", when: handler}), volume, signalled=True)
    assert code == 0, text
    assert "told True" in text
    assert text.count("Current thread 0x") == 1
    assert TOLD not in text


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize("handler", [IGNORES, "install(0)"])
def test_the_handler_of_a_library_is_set_aside_while_training_runs(handler: str, when: str, volume: Path) -> None:
    code, text = outcome(TRAIN.format(**{"before": "", "during": "", when: handler}), volume, signalled=True)
    assert code == 0, text
    assert "told True" in text
    assert text.count(TOLD) == 1


AFTER = """
import faulthandler
stop.install()
faulthandler.register(15)
stop.defer()
stop.end_deferral()
os.kill(os.getpid(), 15)
stop.defer()
stop.end_deferral()
os.kill(os.getpid(), 15)
print('told', stop.notice_at_s is not None, flush=True)
"""


def test_after_training_the_handler_of_the_script_stands_again(volume: Path) -> None:
    code, text = outcome(AFTER, volume)
    assert (code, text.count("Current thread 0x")) == (0, 2), text
    assert "told False" in text


def test_one_that_is_installed_meanwhile_is_left_alone(volume: Path) -> None:
    code = TRAIN.partition("print('up'")[0].format(before=IGNORES, during="")
    assert outcome(f"{code}\ninstall(0)\nstop.end_deferral()\nos.kill(os.getpid(), 15)", volume)[0] == -15


def test_a_child_gets_no_handler_of_the_parents_training(volume: Path) -> None:
    code = TRAIN.partition("print('up'")[0].format(before=DUMPS, during="")
    code += """
pid = os.fork()
if not pid:
    time.sleep(20)
    os._exit(0)
time.sleep(0.1)
os.kill(pid, 15)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), stop.notice_at_s, flush=True)
"""
    assert outcome(code, volume) == (0, "-15 None\n")


IN_C = """
import ctypes
from trainer_hook.process import main_thread
main_thread.listen()
libc, over, asked = ctypes.CDLL(None), threading.Event(), []
def train():
    while not over.is_set():
        stop._polled_s = 0.0
        stop.noticed()
        asked.append(len(main_thread._asked))
        time.sleep(0.01)
stop.install()
{during}
stop.is_training = True
trainer = threading.Thread(target=train)
trainer.start()
{wait}
over.set()
trainer.join()
print('asked', max(asked), flush=True)
"""


def test_a_main_thread_in_c_code_is_not_interrupted_while_training_runs_in_another_one(volume: Path) -> None:
    """Its system calls failed with ``EINTR`` twice a second, and what it was asked to call grew without end."""
    assert outcome(IN_C.format(during="", wait="print('left', libc.sleep(2))"), volume) == (0, "left 0\nasked 0\n")


def test_a_main_thread_that_returns_from_c_code_sets_a_handler_in_c_aside(volume: Path) -> None:
    wait = """
mutex, until = ctypes.create_string_buffer(64), (ctypes.c_long * 2)(int(time.time()) + 2, 0)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_timedlock(mutex, until)
os.kill(os.getpid(), 15)
until = time.monotonic() + 5
while stop.notice_at_s is None and time.monotonic() < until:
    time.sleep(0.01)
print('told', stop.notice_at_s is not None)
"""
    code, text = outcome(IN_C.format(during="ctypes.CDLL(None).signal(15, ctypes.c_void_p(1))", wait=wait), volume)
    assert code == 0, text
    assert "told True\nasked 1\n" in text
