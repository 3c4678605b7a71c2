"""Trainings below this process: those that a Python entry point has started, for example by ``subprocess.run``."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from trainer_hook.volume import lease

_POLL_S = 0.05


def trainers_below(volume: Path, *, ranks: bool) -> set[int]:
    """Return the processes below this one that hold a lease. Without ``ranks``: not the children of multiprocessing."""
    ours = set() if ranks else {getattr(child._popen, "pid", None) for child in _children()}
    return {pid for pid in lease.holders(volume) - ours if _is_below(pid)}


def is_below_trainer(volume: Path) -> bool:
    """Whether a process above this one trains: this is its helper, which it may end while training goes on."""
    training, pid = lease.holders(volume), os.getpid()
    while training and pid > 1:
        pid = _parent_of(pid)
        if pid in training:
            return True
    return False


def wait_for_trainers(volume: Path, *, until_s: float, tell: bool, ranks: bool) -> None:
    """Wait until no process below this one trains, or a monotonic time. ``tell``: send SIGTERM to each, once.

    One that has got the signal already, with its process group, only records it again.
    """
    told: set[int] = set()
    while (training := trainers_below(volume, ranks=ranks)) and time.monotonic() < until_s:
        for pid in training - told if tell else ():
            with contextlib.suppress(OSError):  # ended just now, or another user's: told by .ckpt/terminating
                os.kill(pid, signal.SIGTERM)
        told |= training
        time.sleep(_POLL_S)


def ranks_below() -> bool:
    """Whether multiprocessing has children that the exit waits for, such as ranks that save just in time."""
    # Not is_alive(): it reaps, and the main thread may be waiting for the same child.
    return any(not child.daemon and getattr(child._popen, "returncode", 0) is None for child in _children())


def _children() -> list[Any]:
    process = sys.modules.get("multiprocessing.process")
    return list(process._children) if process is not None else []


def _is_below(pid: int) -> bool:
    while pid > 1 and (pid := _parent_of(pid)) != os.getpid():
        pass
    return pid == os.getpid()


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):  # it has ended
        return 0
