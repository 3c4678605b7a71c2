"""Log configuration: structlog writes JSON lines or aligned text to standard output."""

from __future__ import annotations

import io
import logging
import sys
from typing import Any, Literal

import structlog


def configure(style: Literal["json", "console"]) -> None:
    """Configure the log of the process. Loggers of libraries write warnings and errors only."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file name that is not UTF-8 must not raise from a log call
        sys.stdout.reconfigure(errors="backslashreplace")
    last: Any = structlog.processors.JSONRenderer(ensure_ascii=False)
    if style == "console":
        last = structlog.dev.ConsoleRenderer(colors=sys.stdout.isatty())
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
