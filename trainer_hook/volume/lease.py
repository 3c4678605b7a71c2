"""A rank's lease: a lock that the kernel releases when the process dies."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from pathlib import Path

from trainer_hook.contract import LEASES, LOCK

RETRY_FOR_S = 0.1
"""Retries of a lease that is held: a process that only checks it locks it for an instant."""

_FLOCK = struct.Struct("hhqqi0q")
"""``struct flock`` of 64-bit Linux: type, whence, start, length, process."""

_held: dict[str, int] = {}
"""Descriptors by path. They stay open: closing any descriptor of the file would release the lock."""


def hold(volume: Path, rank: int) -> bool:
    """Take the lease of a rank. Returns false if another process holds it. A forked child does not inherit it.

    Raises ``OSError``: the volume is not writable, or not there.
    """
    folder = volume / LEASES
    for place in (folder.parent, folder):  # never the volume itself: that would hide a missing mount
        place.mkdir(exist_ok=True)
    path = str(folder / f"{rank}.lease")
    if path in _held:
        return True
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    until_s, is_locked = time.monotonic() + RETRY_FOR_S, False
    try:
        while not (is_locked := _locked(fd)) and time.monotonic() < until_s:
            time.sleep(0.01)
    finally:
        if is_locked:
            _held[path] = fd
        else:
            os.close(fd)
    return is_locked


def _locked(fd: int) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holders(volume: Path) -> set[int]:
    """Return the other processes that hold a lease, by their pids in this container."""
    try:
        # Closing a descriptor of a lease that this process holds would release it.
        paths = [path for path in (volume / LEASES).glob("*.lease") if str(path) not in _held]
    except OSError:
        return set()
    return set(map(_holder, paths)) - {0}


def _holder(path: Path) -> int:
    """Return 0 if no process holds it. Only asks: even a short lock of ours could refuse a trainer that takes its lease now."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            answer = fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        finally:
            os.close(fd)
    except OSError:
        return 0
    kind, _, _, _, pid = _FLOCK.unpack(answer)
    return 0 if kind == fcntl.F_UNLCK else int(pid)


def sidecar_holds(volume: Path) -> bool:
    """Whether a sidecar uses the volume: this pod's, or that of an earlier pod, which still flushes. False: or unknown."""
    try:
        fd = os.open(volume / LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for an instant: a sidecar that is refused by it tries again
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False
