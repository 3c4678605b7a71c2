"""The log line of a script in which nothing trained under the hook."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer_hook.activation.boot import RUN_PID
from trainer_hook.contract import DEFAULT_DIR, MARKER, META_RESTORED, TRAINER_STATE
from trainer_hook.process import exit_code
from trainer_hook.process.log import warn
from trainer_hook.volume.checkpoint_folder import finished_on


def watch() -> None:
    """Say so at the exit of this process, if it ends with exit code 0."""
    exit_code.watch()
    atexit.register(_report, time.time(), os.getpid())


def watch_training(optimizer_module: Any) -> None:
    """Say so at the exit of a process without the prefix, if it made an optimizer of ``torch.optim.optimizer``.

    Of several ranks only the first one does. Every process that imports torch comes here: its exit code stays unknown.
    """
    if RUN_PID in os.environ or os.environ.get("RANK", "0") != "0":
        return
    process = sys.modules.get("multiprocessing.process")
    if process is None or process.parent_process() is None:
        atexit.register(_report_training, optimizer_module.Optimizer, time.time(), os.getpid())


def _report_training(optimizer: type, began_s: float, pid: int) -> None:
    # Its constructor marks the method that it wraps, once for each class.
    if any(getattr(getattr(kind, "step", None), "hooked", False) for kind in _kinds_of(optimizer)):
        _report(began_s, pid)


def _kinds_of(base: type) -> Iterator[type]:
    below: list[type] = base.__subclasses__()
    for kind in below:
        yield kind
        yield from _kinds_of(kind)


def _report(began_s: float, pid: int) -> None:
    volume = Path(os.environ.get("CKPT_DIR", "").strip() or DEFAULT_DIR)
    if os.getpid() != pid or exit_code.failed():  # terminated or failed before it trained: not for the lack of a library
        return
    # Written by every process that trains under the hook, this one or one that it started, or by the script itself.
    marks = [volume / c.name / MARKER for c in finished_on(volume) if META_RESTORED not in c.marker.meta]
    for written in (volume / TRAINER_STATE, *marks):
        with contextlib.suppress(OSError):
            if written.stat().st_mtime >= began_s - 1.0:
                return
    warn(
        "nothing was saved: the script used no training library that the hook knows, and not trainer_hook itself: "
        "a loop of your own needs a few lines of trainer_hook.torch.Checkpointer, or of trainer_hook.plain without torch"
    )
