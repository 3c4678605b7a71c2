"""structlog, once, at start: JSON lines for machines or aligned text for people, on standard output."""

from __future__ import annotations

import io
import logging
import sys
from typing import Any, Literal

import structlog


def configure(style: Literal["json", "console"]) -> None:
    """Set up the log of the process; libraries' own loggers say warnings only."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that is no UTF-8 must not fail what only wanted to tell of it
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
