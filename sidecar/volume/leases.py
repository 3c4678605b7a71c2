"""Which training processes are alive: each holds a lock on its own lease, which the kernel frees on any death."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

_FLOCK = struct.Struct("hhqqi0q")
"""``struct flock`` of 64-bit Linux: type, whence, start, length, process."""


def held_leases(folder: Path) -> int:
    """Return how many leases in a directory another process holds."""
    try:
        with os.scandir(folder) as entries:
            leases = [e.path for e in entries if e.name.endswith(".lease") and e.is_file(follow_symlinks=False)]
    except OSError:
        return 0
    return sum(_is_held(lease) for lease in leases)


def _is_held(lease: str) -> bool:
    try:
        fd = os.open(lease, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # Asked, not tried: a lock of ours, however short, would refuse a trainer that takes its lease at that instant.
        answer = fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError:
        return True
    else:
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
    finally:
        os.close(fd)
