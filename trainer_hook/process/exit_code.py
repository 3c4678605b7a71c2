"""With which exit code the interpreter ends: ``atexit`` is not told, and a ``SystemExit`` reaches no ``sys.excepthook``."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from typing import Any, NoReturn

_ended_with: Any = None
"""Code of the exception that ended the interpreter."""


class _Code:
    """Descriptor of ``SystemExit.code`` around the original one."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __get__(self, error: SystemExit | None, owner: type | None = None) -> Any:
        global _ended_with
        if error is None:
            return self
        code = self._original.__get__(error)
        if sys._getframe().f_back is None:  # no Python code asks, but the interpreter: nobody has caught it
            _ended_with = code
        return code

    def __set__(self, error: SystemExit, code: Any) -> None:
        self._original.__set__(error, code)


def watch() -> None:
    """Learn the exit code from now on. Where the interpreter is built otherwise than known, it stays unknown."""
    if isinstance(vars(SystemExit)["code"], _Code):
        return
    with contextlib.suppress(Exception):
        _look_at_code()
    _raise_in_python()


def failed() -> bool:
    """Whether the script ended with an exit code that is not success, or with an exception that nobody caught."""
    # Set before sys.excepthook is called, which a script may have replaced; in a shell or notebook by every error.
    uncaught = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    return uncaught or _ended_with not in (None, 0)


def _look_at_code() -> None:
    # The interpreter reads the attribute of an exception that nobody has caught, through its type's dictionary. A type that
    # is written in C hands that out only read-only: its one referent is the dictionary itself.
    [members] = gc.get_referents(vars(SystemExit))
    original = members["code"]
    members["code"] = _Code(original)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))  # forget where lookups have found it before
    error = SystemExit(3)
    if error.code != 3:
        members["code"] = original
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))


def _raise_in_python() -> None:
    # Up to Python 3.11 what sys.exit raises stays a bare code, without an attribute, unless it passes an except clause.
    def exit(status: Any = None, /) -> NoReturn:
        raise SystemExit(*(() if status is None else (status,)))

    exit.__doc__ = sys.exit.__doc__
    sys.exit = exit
