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


def size_text(size_bytes: float) -> str:
    """Return an amount with three digits and a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 999.5:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} TB"


def next_step(*, has_checkpoints: bool) -> str:
    """Return what to change so that a save fits. ``has_checkpoints``: some are finished on the volume."""
    fewer = ", or keep fewer checkpoints on it (CKPT_KEEP_LOCAL, CKPT_SAVE_TOTAL_LIMIT)" if has_checkpoints else ""
    return f"enlarge the volume (sizeLimit of the emptyDir, storage of the PVC){fewer}"


def lack_of_space(error: str, *, expected_bytes: int, written_bytes: int, free_bytes: int | None, has_checkpoints: bool) -> str:
    """Return what a save needs, what there is, and the next step, for an ``error`` of a full volume.

    Args:
        error: As ``described`` returned it.
        expected_bytes: Size of the save by the ones before; 0: unknown.
        written_bytes: Written of it, before the volume was full.
        free_bytes: Free once that was deleted; ``None``: unknown.
        has_checkpoints: Some are finished on the volume.
    """
    needs = f"about {size_text(expected_bytes)}" if expected_bytes > written_bytes else f"more than {size_text(written_bytes)}"
    free = "" if free_bytes is None else f", {size_text(free_bytes)} are free"
    if os.strerror(errno.EDQUOT) in error:
        return f"it takes {needs}{free and f'{free} on the volume'}: raise this user's quota there"
    return f"it takes {needs}{free}: {next_step(has_checkpoints=has_checkpoints)}"


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
