"""Free space of the volume, and errors that come of its lack."""

from __future__ import annotations

import errno
import os
from pathlib import Path

NEARLY_FULL_BYTES = 1 << 20
_FULL = "the volume is full"
_REASONS = (_FULL, os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


def free_bytes(volume: Path) -> int:
    """Return the free space. Raises ``OSError``: it is unknown."""
    space = os.statvfs(volume)
    return space.f_bavail * space.f_frsize


def described(error: Exception, folder: Path) -> str:
    """Return an error of a write to ``folder`` as one line. On a full volume it says so, which torch does not."""
    text = f"{type(error).__name__}: {error}"[:500].replace("\n", " ")
    return text if is_of_full_volume(text) or not _is_full(folder) else f"{_FULL}: {text}"


def is_of_full_volume(text: str) -> bool:
    """Whether an error that ``described`` returned is due to a full volume."""
    return any(reason in text for reason in _REASONS)


def _is_full(folder: Path) -> bool:
    try:
        space = os.statvfs(folder)
    except OSError:
        return False
    return space.f_bavail * space.f_frsize < NEARLY_FULL_BYTES or (space.f_files > 0 and space.f_favail == 0)
