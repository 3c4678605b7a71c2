"""``SystemExit`` in a signal handler, made again where Python ignores it.

A handler runs between any two bytecodes of the main thread: also in a destructor or in a callback of ``fork``, whose
exceptions Python reports (``sys.unraisablehook``) and drops. The script would go on as if no signal had come.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

_AGAIN_S = 0.02
"""Time from the exception that was dropped to the next attempt: the destructor or callback has returned by then."""


def system_exit(code: int, *, again: Callable[[], object]) -> SystemExit:
    """Return the exception to raise in the main thread. ``again``, called in another thread: the exception was dropped."""
    error, theirs = SystemExit(code), sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if unraisable.exc_value is not error:
            theirs(unraisable)
            return
        if sys.unraisablehook is hook:
            sys.unraisablehook = theirs
        soon(again)

    sys.unraisablehook = hook
    return error


def soon(then: Callable[[], object]) -> None:
    """Call a function in another thread when the callback that runs in this one has returned.

    The interpreter's exit waits for it: a script that has nothing left to do does not end with 0.
    """
    threading.Timer(_AGAIN_S, then).start()
