"""Leases of training processes: each process locks its own lease file, and the kernel releases the lock when it dies."""

from __future__ import annotations

import fcntl
import os
import struct

from sidecar.volume.descriptors import opened
from sidecar.volume.opener import Place

_FLOCK = struct.Struct("hhqqi0q")
"""``struct flock`` of 64-bit Linux: type, whence, start, length, process."""
MOST_LEASES = 10_000
"""Maximum number of leases checked, far above a pod's processes: a flood of files must not keep the sidecar busy."""


def held_leases(folder: Place) -> int:
    """Return how many leases in a directory another process holds."""
    try:
        with folder.held() as held:
            leases = [name for name, _ in (held / "").entries() if name.endswith(".lease")]
            return sum(_is_held(held / lease) for lease in leases[:MOST_LEASES])
    except OSError:
        return 0


def _is_held(lease: Place) -> bool:
    try:
        fd = lease.open_file()
    except OSError:
        return False
    with opened(fd):
        try:
            # Query the lock without taking it: even a short lock of ours could refuse a trainer that takes its lease now.
            answer = fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        except OSError:
            return True
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
