"""Standard output and standard error of the process, also where they are closed or cannot be written."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


class OutputLost(Exception):
    """Standard output cannot be written."""


class _Output(io.FileIO):
    """Raises once. Later bytes are dropped: the interpreter writes what is buffered once more as it ends."""

    _is_lost = False

    def write(self, data: memoryview) -> int | None:  # type: ignore[override]
        if self._is_lost:
            return len(data)
        try:
            return super().write(data)
        except BrokenPipeError:
            self._is_lost = True
            raise
        except OSError as error:
            self._is_lost = True
            raise OutputLost(f"standard output cannot be written: {error.strerror}") from None


class _Errors(io.FileIO):
    """Drops what cannot be written: a command does its work and ends with its exit code although nobody reads why."""

    def write(self, data: memoryview) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError:
            return len(data)


def prepare() -> None:
    """Make standard output and standard error safe to write to, if they are those that the process began with.

    What is closed becomes ``/dev/null``. Otherwise the next file or socket would get its number, and what is printed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text(_Output(1, "w", closefd=False), sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Errors(2, "w", closefd=False), sys.stderr)


def _text(raw: io.FileIO, before: TextIO | None) -> TextIO:
    """Return a stream that prints as the one of the interpreter does, which is ``None`` where its number was closed."""
    encoding, errors = (before.encoding, before.errors) if before else ("utf-8", "backslashreplace")
    by_line = isinstance(raw, _Errors) or raw.isatty()
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=by_line)
