"""The log line of a script under ``trainer_hook run`` in which nothing trained under the hook."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from pathlib import Path

from trainer_hook.contract import DEFAULT_DIR, TRAINER_STATE
from trainer_hook.process import exit_code
from trainer_hook.process.log import warn


def watch() -> None:
    """Say so at the exit of this process, if it ends with exit code 0."""
    exit_code.watch()
    atexit.register(_report, time.time(), os.getpid())


def _report(began_s: float, pid: int) -> None:
    volume = os.environ.get("CKPT_DIR", "").strip() or DEFAULT_DIR
    if os.getpid() != pid or exit_code.failed():  # terminated or failed before it trained: not for the lack of a library
        return
    # Written by every process that trains under the hook: by this one, or by one that it started.
    with contextlib.suppress(OSError):
        if (Path(volume) / TRAINER_STATE).stat().st_mtime >= began_s - 1.0:
            return
    warn(
        "nothing was saved: the script used no training library that the hook knows, and not trainer_hook itself: "
        "see docs/trainers.md"
    )
