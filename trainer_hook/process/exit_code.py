"""The exit code of the interpreter, for ``atexit``, which is not given it; ``SystemExit`` does not reach ``sys.excepthook``."""

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
        if sys._getframe().f_back is None:  # read by the interpreter, not by Python code: the exception was not caught
            _ended_with = code
        return code

    def __set__(self, error: SystemExit, code: Any) -> None:
        self._original.__set__(error, code)


def watch() -> None:
    """Record the exit code from now on. On an interpreter of another structure it stays unknown."""
    if isinstance(vars(SystemExit)["code"], _Code):
        return
    with contextlib.suppress(Exception):
        _replace_code()
    _raise_in_python()


def is_uncaught() -> bool:
    """Whether an exception other than ``SystemExit`` ended the script."""
    # last_value is set before sys.excepthook, which a script may have replaced; in a shell or notebook every error sets it.
    return getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")


def failed() -> bool:
    """Whether the script ended with a non-zero exit code or an uncaught exception."""
    return is_uncaught() or _ended_with not in (None, 0)


def is_known_to_be(code: int) -> bool:
    """Whether the script ended with this exit code."""
    return not failed() and code == 0 if _ended_with is None else bool(_ended_with == code)


def _replace_code() -> None:
    # The interpreter reads the attribute of an uncaught exception through the dictionary of its type. A type written in C
    # exposes only a read-only proxy of it, whose one referent is the dictionary.
    [members] = gc.get_referents(vars(SystemExit))
    original = members["code"]
    members["code"] = _Code(original)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))  # clear the cache of attribute lookups
    error = SystemExit(3)
    if error.code != 3:
        members["code"] = original
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))


def _raise_in_python() -> None:
    # Up to Python 3.11 sys.exit sets a bare code without a SystemExit object, unless an except clause normalizes it.
    def exit(status: Any = None, /) -> NoReturn:
        raise SystemExit(*(() if status is None else (status,)))

    exit.__doc__ = sys.exit.__doc__
    sys.exit = exit
