"""A handler of SIGTERM that C code has installed: Python's table of handlers does not show it.

``faulthandler.register`` without ``chain`` is such code, and so are crash reporters of libraries. Python's own C function then
runs no more, which would call the Python handler and write to the wakeup descriptor.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import signal
import struct
from typing import Any

from trainer_hook.process.log import warn

_BYTES = 256
"""More than a ``struct sigaction`` of any libc."""
_HANDLER = struct.Struct("@P")
_FLAGS = struct.Struct("@i")
_FLAGS_AT = 136
"""Offset of ``sa_flags`` in that of glibc and musl on 64-bit machines, after the function and 1024 bits of mask."""
_SA_NODEFER = 0x40000000


class NativeHandler:
    """Takes the place of a handler of C code, and gives it back. For the main thread, but for ``is_in_place``."""

    def __init__(self) -> None:
        self._pythons: int | None = None
        """Address of Python's C function; ``None``: unknown."""
        self._taken: bytes | None = None
        """The ``struct sigaction`` whose place was taken; ``None``: there was none."""

    def see_pythons(self) -> None:
        """Remember Python's C function. Call it after ``signal.signal`` with a Python handler."""
        present = _action()
        self._pythons = None if present is None else _function(present)

    @property
    def is_in_place(self) -> bool:
        """Whether a C handler keeps a Python handler from running. In any thread."""
        return self._hiding() is not None

    def take_place(self) -> None:
        """Have Python handlers run again, unless the C handler calls them itself."""
        if (present := self._hiding()) is None:
            return
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        self._taken = present
        if not self._is_of_python(present):
            _say_that_its_place_is_taken()

    def _hiding(self) -> bytes | None:
        """Return the ``struct sigaction`` of a C handler that hides the signal from a Python one; ``None``: there is none."""
        present, pythons = _action(), self._pythons
        if present is None or pythons is None or _function(present) == pythons:
            return None
        if self._is_of_python(present) and _FLAGS.unpack_from(present, _FLAGS_AT)[0] & _SA_NODEFER:
            return None  # faulthandler with chain calls it; source: faulthandler.c, faulthandler_register()
        return present if callable(signal.getsignal(signal.SIGTERM)) else None

    def give_back(self) -> None:
        """Install the C handler again, if its place was taken and no other one was installed since."""
        (taken, self._taken), present = (self._taken, None), _action()
        if taken is not None and present is not None and _function(present) == self._pythons:
            _sigaction(ctypes.create_string_buffer(taken, _BYTES), None)

    def call(self) -> None:
        """Have faulthandler write its tracebacks. No other C handler is called: it may end the process."""
        if self._taken is not None and self._is_of_python(self._taken):
            # With the interpreter's lock held, as when a signal comes.
            ctypes.PYFUNCTYPE(None, ctypes.c_int)(_function(self._taken))(int(signal.SIGTERM))

    def _is_of_python(self, action: bytes) -> bool:
        base = None if self._pythons is None else _base_of(self._pythons)
        return base is not None and _base_of(_function(action)) == base


@functools.cache
def _say_that_its_place_is_taken() -> None:
    warn("a library has a handler of SIGTERM in C that hides the signal: while training runs, the hook's stands in its place")


class _Place(ctypes.Structure):
    _fields_ = (("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("at", ctypes.c_void_p))


def _action() -> bytes | None:
    """Return the present ``struct sigaction``; ``None``: unknown, as on another system."""
    buffer = ctypes.create_string_buffer(_BYTES)
    return buffer.raw if _sigaction(None, buffer) else None


def _function(action: bytes) -> int:
    """Return the address of a handler; 0: the default action, 1: ignored."""
    return int(_HANDLER.unpack_from(action)[0])


def _sigaction(new: Any, old: Any) -> bool:
    with contextlib.suppress(Exception):  # no such function
        return bool(ctypes.CDLL(None).sigaction(int(signal.SIGTERM), new, old) == 0)
    return False


def _base_of(address: int) -> int | None:
    """Return where the program or library of a function begins; ``None``: unknown, or no function."""
    place = _Place()
    with contextlib.suppress(Exception):
        if address > 1 and ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(place)):
            return int(place.base) if place.base is not None else None
    return None
