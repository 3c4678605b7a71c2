"""One tidy line per fact on standard error, prefix ``[checkpoint]``. Only rank 0 speaks, except of errors."""

from __future__ import annotations

import os
import sys

PREFIX = "[checkpoint]"

_known: list[int] = []


def set_rank(rank: int) -> None:
    """Tell which rank this process is, where the launcher does not say so in ``RANK``."""
    _known[:] = [rank]


def _rank() -> str | None:
    return str(_known[0]) if _known else os.environ.get("RANK")


def info(text: str) -> None:
    """Tell a fact, once per job."""
    if _rank() in (None, "0"):
        _write(text)


def warn(text: str) -> None:
    """Tell of trouble, whichever rank has it."""
    rank = _rank()
    _write(f"WARNING{'' if rank is None else f' (rank {rank})'}: {text}")


def _write(text: str) -> None:
    if sys.stderr is None:  # print would take standard output instead
        return
    try:
        print(f"{PREFIX} {text}", file=sys.stderr, flush=True)  # noqa: T201
    except (OSError, ValueError):  # a closed stream must not stop training
        return
