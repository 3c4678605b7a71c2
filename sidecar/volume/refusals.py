"""Regular files in a checkpoint that are not sent: those of the sidecar's own, and ones larger than the volume."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from sidecar.volume.opener import Place
from trainer_hook.contract import JOURNAL, LEASES, SYSTEM_DIR

_FOLDERS = (SYSTEM_DIR, JOURNAL, LEASES)
_BLOCK_BYTES = 512
"""Unit of ``st_blocks``, whatever the file system's own. Source: stat(2)."""


class Refusals:
    """What is refused in one walk. The volume is asked only when a file needs it."""

    def __init__(self, root: Place) -> None:
        """Look at the volume below ``root``."""
        self._root = root
        self._own: dict[tuple[int, int], str] | None = None
        self._total_bytes: int | None = None

    def kind_of(self, status: os.stat_result) -> str | None:
        """Return why a regular file is not sent, as a noun; ``None``: it is."""
        if status.st_nlink > 1 and (own := self._own_files().get((status.st_dev, status.st_ino))) is not None:
            return f"hard link to {own}"
        if status.st_size > self._volume_bytes() > 0:  # whatever st_blocks says: CephFS derives it from the size
            return f"sparse file of {status.st_size} bytes on a volume of {self._volume_bytes()}"
        return None

    def _own_files(self) -> dict[tuple[int, int], str]:
        """Return the sidecar's own files on the volume, by device and inode: a trainer can link them, not only read them."""
        if self._own is None:
            self._own = {}
            for folder in _FOLDERS:
                with suppress(OSError):
                    for name, is_folder in (self._root / folder).entries():
                        if not is_folder:
                            self._add(f"{folder}/{name}")
        return self._own

    def _add(self, path: str) -> None:
        with suppress(OSError):  # just deleted
            status = (self._root / path).status()
            if self._own is not None and stat.S_ISREG(status.st_mode):
                self._own[status.st_dev, status.st_ino] = path

    def _volume_bytes(self) -> int:
        """Return the size of the volume; 0: unknown."""
        if self._total_bytes is None:
            self._total_bytes = 0
            with suppress(OSError):
                space = self._root.space()
                self._total_bytes = space.f_blocks * space.f_frsize
        return self._total_bytes


def has_holes(status: os.stat_result) -> bool:
    """Whether a file takes less space than its size: it is sparse, or the file system compresses it."""
    return status.st_blocks * _BLOCK_BYTES < status.st_size
