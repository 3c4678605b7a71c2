"""Log configuration: structlog writes JSON lines or aligned text to standard output."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import structlog

MOST_MESSAGES = 1000
"""Messages of libraries that are counted; with one more the count begins anew."""


class LogOutput:
    """Writes the lines of the log to a file descriptor.

    A line that cannot be written is dropped: uploads must go on although a disk is full or a pipe is closed. When a line can be
    written again, the number of dropped lines follows it.
    """

    def __init__(self, descriptor: int, dropped_line: Callable[[int], str]) -> None:
        """Write to an open descriptor. ``dropped_line`` returns the line that tells how many were dropped."""
        self._descriptor = descriptor
        self._dropped_line = dropped_line
        self._lock = threading.Lock()
        self._dropped = 0
        self._in_line = False
        """The last byte that was written is not the end of a line."""

    def msg(self, line: str) -> None:
        """Write a line, or drop it."""
        with self._lock:
            if not self._write(line):
                self._dropped += 1
            elif self._dropped and self._write(self._dropped_line(self._dropped)):
                self._dropped = 0

    debug = info = warning = error = critical = msg

    def _write(self, line: str) -> bool:
        # Not through sys.stdout: its buffer would keep bytes that cannot be written, and raise again with the next line.
        # A file name that is not UTF-8 must not raise from a log call either.
        left = (("\n" if self._in_line else "") + line + "\n").encode(errors="backslashreplace")
        try:
            while left:
                written = os.write(self._descriptor, left)
                self._in_line, left = not left[:written].endswith(b"\n"), left[written:]
        except OSError:
            return False
        return True


class LibraryMessages(logging.Handler):
    """Passes on the warnings and errors of libraries: the same one the 1st, 2nd, 4th and 8th time."""

    def __init__(self) -> None:
        """Start with no message."""
        super().__init__()
        self._times: Counter[tuple[str, int, str, str]] = Counter()
        """How often each place in the libraries' code has written a message of these words about an error of this type."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line: of a warning the error's text, of an error its stack trace, too."""
        message, error = record.getMessage(), record.exc_info[1] if record.exc_info else None
        same = record.pathname, record.lineno, message.partition("\n")[0], type(error).__name__
        if len(self._times) >= MOST_MESSAGES and same not in self._times:
            self._times.clear()
        self._times[same] += 1
        if self._times[same].bit_count() > 1:
            return
        fields: dict[str, Any] = {"library": record.name, "message": message, "times": self._times[same]}
        if error is not None:
            fields |= {"error": str(error) or type(error).__name__}
            fields |= {"exc_info": record.exc_info} if record.levelno >= logging.ERROR else {}
        structlog.get_logger().log(record.levelno, "library_warned", **fields)


def configure(style: Literal["json", "console"]) -> None:
    """Configure the log of the process. Loggers of libraries write warnings and errors only."""
    last: Any = structlog.processors.JSONRenderer(ensure_ascii=False)
    if style == "console":
        last = structlog.dev.ConsoleRenderer(colors=sys.stdout.isatty())
    processors = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        last,
    ]

    def dropped_line(lines: int) -> str:
        event: Any = {"event": "log_lines_dropped", "lines": lines}
        for processor in processors:
            event = processor(None, "warning", event)
        return str(event)

    output = LogOutput(sys.stdout.fileno(), dropped_line)
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=lambda *_: output,
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, handlers=[LibraryMessages()])
