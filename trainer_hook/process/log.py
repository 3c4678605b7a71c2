"""Log on standard error: one line per event, prefix ``[checkpoint]``. Only rank 0 logs, except warnings."""

from __future__ import annotations

import os
import sys

PREFIX = "[checkpoint]"

_set_rank: list[int] = []


def set_rank(rank: int) -> None:
    """Set the rank of this process, for launchers that do not set ``RANK``."""
    _set_rank[:] = [rank]


def _rank() -> str | None:
    return str(_set_rank[0]) if _set_rank else os.environ.get("RANK")


def info(text: str) -> None:
    """Log an event, on rank 0 only."""
    if _rank() in (None, "0"):
        _write(text)


def warn(text: str) -> None:
    """Log a warning, on any rank."""
    rank = _rank()
    _write(f"WARNING{'' if rank is None else f' (rank {rank})'}: {text}")


def _write(text: str) -> None:
    if sys.stderr is None:  # print would use standard output
        return
    try:
        print(f"{PREFIX} {text}", file=sys.stderr, flush=True)  # noqa: T201
    except (OSError, ValueError, RuntimeError):  # a closed stream, or one that a handler has interrupted: training goes on
        return
