"""Handlers of SIGTERM that the script itself has installed, before or after the hook's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hook.process.test_signals import WAITS, outcome

HELD = WAITS.replace("with stop.training():", "stop.defer()\nif True:")


@pytest.mark.parametrize("end", ["sys.exit(9)", "raise KeyboardInterrupt", "raise ValueError"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_handler_of_the_script_that_ends_it_does_not_cut_the_save_short(order: str, end: str, volume: Path) -> None:
    """One that was installed after the import of the library ended training without a save."""
    theirs = f"def theirs(*_):\n    {end}\nsignal.signal(signal.SIGTERM, theirs)\n"
    code = theirs + "stop.install()\n" if order == "before" else "stop.install()\n" + theirs
    code += HELD + "print(type(stop.suppressed).__name__)"
    raised = {"sys.exit(9)": "SystemExit"}.get(end, end.removeprefix("raise "))
    assert outcome(code, volume, signalled=True) == (0, f"up\ntold True\n{raised}\n")


def test_a_handler_over_ours_is_back_after_training(volume: Path) -> None:
    theirs = "theirs = lambda *_: print('theirs')\nbelow = signal.signal(signal.SIGTERM, theirs)\n"
    code = "stop.install()\n" + theirs + HELD + "stop.end_deferral()\nprint(signal.getsignal(signal.SIGTERM) is theirs)\n"
    code += "signal.signal(signal.SIGTERM, below)\nos.kill(os.getpid(), signal.SIGTERM)"
    assert outcome(code, volume, signalled=True) == (143, "up\ntheirs\ntold True\nTrue\n")


def test_a_handler_over_ours_may_call_the_one_that_it_replaced(volume: Path) -> None:
    theirs = (
        "def theirs(*signalled):\n    print('theirs')\n    below(*signalled)\nbelow = signal.signal(signal.SIGTERM, theirs)\n"
    )
    assert outcome("stop.install()\n" + theirs + HELD, volume, signalled=True) == (0, "up\ntheirs\ntold True\n")


@pytest.mark.parametrize("action", ["SIG_DFL", "SIG_IGN"])
def test_a_signal_that_the_script_resets_after_the_import_counts_during_training(action: str, volume: Path) -> None:
    code = f"stop.install()\nsignal.signal(signal.SIGTERM, signal.{action})\n"
    assert outcome(code + HELD, volume, signalled=True) == (0, "up\ntold True\n")


IMPATIENT = "signals.main_thread.listen()\nsignals._IDLE_EXIT_S = 1\nstop.install()\n"


@pytest.mark.parametrize("first", ["", "signal.signal(signal.SIGTERM, below)"], ids=["stays", "handles one signal"])
def test_a_handler_over_ours_has_the_time_that_it_takes_outside_training(first: str, volume: Path) -> None:
    """One that saved the state of a loop of the script's own was cut off after five seconds."""
    theirs = f"def theirs(*_):\n    {first}\n    time.sleep(2)\n    print('saved')\n    sys.exit(0)\n"
    theirs += "below = signal.signal(signal.SIGTERM, theirs)\n"
    code = IMPATIENT + theirs + "print('up', flush=True)\nwhile True:\n    time.sleep(0.001)\n"
    assert outcome(code, volume, signalled=True) == (0, "up\nsaved\n")


def test_a_signal_that_the_script_ignores_after_the_import_does_not_end_it(volume: Path) -> None:
    code = IMPATIENT + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    code += "print('up', flush=True)\ntime.sleep(2)\nprint('done')\n"
    assert outcome(code, volume, signalled=True) == (0, "up\ndone\n")


def test_a_main_thread_that_stays_in_c_code_ends_all_the_same(volume: Path) -> None:
    code = "import ctypes\nlibc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)\nlibc.pthread_mutex_lock(mutex)\n"
    code += IMPATIENT + "print('up', flush=True)\nlibc.pthread_mutex_lock(mutex)\n"
    assert outcome(code, volume, signalled=True) == (143, "up\n")
