"""SIGTERM at a moment when a process forks, or where Python ignores exceptions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hook.process.test_signals import outcome

TERMINATED_IN_CALLBACK = "os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))\n"
"""Registered before the hook's callbacks: the child has the signal when they run."""
HANDLER = """
def theirs(*_):
    print('theirs', flush=True)
    sys.exit(5)
signal.signal(signal.SIGTERM, theirs)
"""
FORKS = """
child = os.fork()
if child == 0:
    try:
        time.sleep(20)
        print('goes on', flush=True)
    except SystemExit as error:
        os._exit(error.code)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


def test_a_handler_in_a_child_runs_once_and_after_the_callbacks_of_libraries_that_were_imported_later(volume: Path) -> None:
    """``random`` has one: Python ignored the exception of a handler that interrupted it, and nothing ended the child."""
    late = "os.register_at_fork(after_in_child=lambda: (time.sleep(0.2), print('callback', flush=True)))\n"
    code = TERMINATED_IN_CALLBACK + "stop.install()\n" + HANDLER + late + FORKS
    assert outcome(code, volume) == (0, "callback\ntheirs\n5 set()\n")


def test_so_it_is_where_callbacks_are_registered_between_two_forks(volume: Path) -> None:
    late = "os.register_at_fork(after_in_child=lambda: (time.sleep(0.2), print('callback', flush=True)))\n"
    late += "sys.modules['a library'] = os\n"
    code = TERMINATED_IN_CALLBACK + "stop.install()\n" + HANDLER + FORKS + late + FORKS
    assert outcome(code, volume) == (0, "theirs\n5 set()\ncallback\ntheirs\n5 set()\n")


PARENT = """
import atexit
atexit.register(lambda: print('blocked in the child:', bool(os.wait()[1])))
if os.fork() == 0:
    os._exit(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
class Slow:
    def __del__(self):
        time.sleep(0.2)
Slow()
time.sleep(20)
print('goes on')
"""
TERMINATED_BEFORE_THE_FORK = "os.register_at_fork(before=lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM))\n"


def test_a_handler_in_the_parent_runs_once_and_its_exception_is_raised_until_python_does_not_ignore_it(volume: Path) -> None:
    """It had been called again: one that saves and exits would have saved twice."""
    code = TERMINATED_BEFORE_THE_FORK + "stop.install()\n" + HANDLER + PARENT
    assert outcome(code, volume) == (5, "theirs\nblocked in the child: False\n")


HANDLER_INTERRUPTS_THE_BLOCK = """
real, armed = signal.pthread_sigmask, [True]
def mask(how, which):
    if armed and how == signal.SIG_BLOCK and which:
        armed.clear()
        {before}
        theirs()
    return real(how, which)
signal.pthread_sigmask = mask
"""


@pytest.mark.parametrize("before", ["pass", "real(how, which)"], ids=["before", "after"])
def test_a_handler_that_interrupts_the_block_leaves_no_process_blocked(before: str, volume: Path) -> None:
    """The mask before the fork was not known any more: SIGTERM stayed blocked, and ended neither child nor parent."""
    code = "stop.install()\n" + HANDLER + HANDLER_INTERRUPTS_THE_BLOCK.format(before=before) + PARENT
    assert outcome(code, volume) == (5, "theirs\nblocked in the child: False\n")


CHAINED = """
below = signal.getsignal(signal.SIGTERM)
def theirs(*signalled):
    print('theirs', flush=True)
    if callable(below):
        below(*signalled)
signal.signal(signal.SIGTERM, theirs)
"""
ENDS_A_CHILD = """
child = os.fork()
if child == 0:
    time.sleep(20)
    os._exit(0)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("training", ["", "stop.defer()\n"], ids=["outside training", "training"])
def test_a_child_whose_handler_calls_the_one_below_ends(training: str, volume: Path) -> None:
    """A pool or loader that ends its workers, and the exit of multiprocessing, had waited for ever."""
    code = "stop.install()\n" + CHAINED + training + ENDS_A_CHILD
    assert outcome(code, volume) == (0, "theirs\n-15\n")


TRAINS = """
    own = StopSignal(volume, exit_code=143)
    own.install()
    own.defer()
    ready.set()
    while not own.noticed():
        time.sleep(0.01)
    print('noticed', own.suppressed, flush=True)
"""


def test_so_does_a_child_that_trains_which_saves_first(volume: Path) -> None:
    code = ENDS_A_CHILD.replace("    time.sleep(20)\n", TRAINS).replace("os.kill", "ready.wait(60)\nos.kill")
    code = "import multiprocessing\nready = multiprocessing.get_context('fork').Event()\nstop.install()\n" + CHAINED + code
    assert outcome(code, volume) == (0, "theirs\nnoticed 143\n0\n")


IGNORED = {
    "a destructor": "class Ends:\n    def __del__(self):\n        raise_signal()\nEnds()\n",
    "a callback of fork": "os.register_at_fork(after_in_parent=raise_signal)\nif os.fork() == 0:\n    os._exit(0)\n",
}


@pytest.mark.parametrize("where", IGNORED)
def test_a_signal_ends_the_process_where_python_ignores_exceptions(where: str, volume: Path) -> None:
    """A rank that was just forked has the fork's callbacks still to run in its launcher."""
    code = "def raise_signal():\n    signal.raise_signal(signal.SIGTERM)\n    time.sleep(0)\nstop.install()\n"
    code += "signals.ranks_below = lambda: True\n"  # without ranks, a timer ends the process
    code += IGNORED[where] + "try:\n    time.sleep(20)\n    print('goes on')\nfinally:\n    print('cleans up')\n"
    assert outcome(code, volume) == (143, "cleans up\n")
