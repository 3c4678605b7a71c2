"""One tidy line per fact on standard error, prefix ``[checkpoint]``. Only rank 0 speaks, except of errors."""

from __future__ import annotations

import os
import sys

PREFIX = "[checkpoint]"


def say(text: str) -> None:
    """Tell a fact, once per job."""
    if os.environ.get("RANK", "0") == "0":
        _write(text)


def warn(text: str) -> None:
    """Tell of trouble, whichever rank has it."""
    rank = os.environ.get("RANK")
    _write(f"WARNING{'' if rank is None else f' (rank {rank})'}: {text}")


def _write(text: str) -> None:
    if sys.stderr is None:  # print would take standard output instead
        return
    try:
        print(f"{PREFIX} {text}", file=sys.stderr, flush=True)  # noqa: T201
    except (OSError, ValueError):  # a closed stream must not stop training
        return
