"""Exceptions that end the script, and those of signal handlers, raised again where Python ignores them.

A handler runs between any two bytecodes of the main thread: also in a destructor or in a callback of ``fork``, whose
exceptions Python reports (``sys.unraisablehook``) and drops. The script would go on as if no signal had come.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_AGAIN_S = 0.02
"""Time from the exception that was dropped to the next attempt: the destructor or callback has often returned by then."""


def has_script_ended(frame: FrameType | None) -> bool:
    """Whether the interpreter exits: it waits for threads, or runs functions of ``atexit``. Exceptions are ignored there.

    ``frame``: what the main thread runs. It counts as alive until ``threading`` has called the functions of executors.
    """
    if not threading.main_thread().is_alive():
        return True
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    shutdown = getattr(getattr(threading, "_shutdown", None), "__code__", None)
    return frame is not None and frame.f_code is shutdown


def exit_with(code: int) -> SystemExit:
    """Return the exception to raise, after the call of ``sys.exit`` that libraries replace to learn the exit code.

    Without the call wandb shows a run as finished that was preempted.
    """
    with contextlib.suppress(SystemExit, Exception):
        sys.exit(code)
    return SystemExit(code)


def watched(error: BaseException, *, dropped: Callable[[], object]) -> BaseException:
    """Return the exception to raise in the main thread. ``dropped`` is called there if Python ignores it."""
    theirs = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if unraisable.exc_value is not error:
            theirs(unraisable)
            return
        if sys.unraisablehook is hook:
            sys.unraisablehook = theirs
        dropped()

    sys.unraisablehook = hook
    return error


def kept(error: BaseException) -> BaseException:
    """Return the exception to raise in a handler of SIGTERM. It is raised until Python does not ignore it."""
    return watched(error, dropped=functools.partial(raise_later, error))


def raise_later(error: BaseException) -> None:
    """Raise an exception of the handler of SIGTERM when the callback that runs now has returned. In the main thread only.

    The handler does not run a second time: it may have saved the script's work.
    """
    theirs = signal.getsignal(signal.SIGTERM)

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(number, theirs)
        if not has_script_ended(frame):
            raise kept(error)
        if callable(theirs):  # the interpreter exits meanwhile, and would ignore the exception
            theirs(number, frame)

    signal.signal(signal.SIGTERM, handle)
    soon(functools.partial(os.kill, os.getpid(), signal.SIGTERM))


def soon(then: Callable[[], object]) -> None:
    """Call a function in another thread a moment later.

    The interpreter's exit waits for it: a script that has nothing left to do does not end with 0.
    """
    threading.Timer(_AGAIN_S, then).start()
