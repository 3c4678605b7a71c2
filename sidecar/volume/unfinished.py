"""Files of a checkpoint that the trainer still writes: which can be read already, and opened as those that were seen."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from sidecar.core.local import FoundFile
from sidecar.volume.files import has_only_grown, opened_as_seen
from trainer_hook.contract import ContractError, check_path

QUIET_S = 2.0
"""A file whose size and time stayed the same this long counts as closed, where nobody said so."""
QUIET_GROWING_S = 60.0
"""The same for a file that was seen growing, where no closing was heard of: a writer that waits for the disk or the GPU goes
on, and what was sent as the end of the file would have to be sent again."""
_BLOCK_BYTES = 512
"""Unit of ``st_blocks``, whatever the file system's own. Source: stat(2)."""


@dataclass(frozen=True, slots=True)
class Look:
    """The regular files of a directory, in the order of their paths."""

    closed: tuple[FoundFile, ...]
    """Nobody seems to write these."""
    open: tuple[FoundFile, ...]
    """These are being written, without holes."""


def look_at(folder: Path, closed: Mapping[str, float], *, growing: Collection[str] = (), quiet_only: bool = False) -> Look:
    """Return what a directory holds now; it may be changing, or gone.

    Args:
        folder: The directory.
        closed: When the kernel said that a path was closed after writing (epoch seconds), by absolute path.
        growing: Paths in the directory that were seen growing.
        quiet_only: Believe only in time.
    """
    now_s = time.time()
    ended, being_written = [], []
    for inside, _, names in os.walk(folder):
        for name in names:
            path = Path(inside, name)
            try:
                status = path.lstat()
                relative = check_path(path.relative_to(folder).as_posix())
            except (OSError, ContractError):
                continue
            if not stat.S_ISREG(status.st_mode):
                continue
            file = FoundFile(relative, status.st_size, status.st_mtime_ns, status.st_ino)
            closed_s = closed.get(str(path))  # earlier than the last write where another machine's clock made the time
            quiet_s = QUIET_GROWING_S if relative in growing and closed_s is None else QUIET_S
            is_quiet = now_s - max(status.st_mtime, status.st_ctime) > quiet_s
            was_closed = not quiet_only and closed_s is not None and closed_s >= status.st_mtime
            if is_quiet or was_closed:
                ended.append(file)
            elif status.st_blocks * _BLOCK_BYTES >= status.st_size:  # else written in another order than from its beginning
                being_written.append(file)
    return Look(_sorted(ended), _sorted(being_written))


class Unfinished:
    """Opens files below a directory of which nothing is held."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, FoundFile] = {}
        self._growing: dict[str, FoundFile] = {}

    def see(self, file: FoundFile) -> None:
        """Remember what a closed file is that will be opened."""
        self._seen[file.path] = file
        self._growing.pop(file.path, None)

    def see_growing(self, file: FoundFile) -> None:
        """Remember what a file is of which the beginning will be read while the rest is written."""
        self._growing[file.path] = file
        self._seen.pop(file.path, None)

    @property
    def size_bytes(self) -> int:
        """Sum of the files that were seen."""
        return sum(file.size_bytes for file in (*self._seen.values(), *self._growing.values()))

    @property
    def newest_mtime_s(self) -> float:
        """When something was last written, in epoch seconds: to a file that was seen, or to the directory."""
        seen = (*self._seen.values(), *self._growing.values())
        newest_s = max((file.mtime_ns for file in seen), default=0) / 1e9
        try:
            return max(newest_s, self._folder.stat().st_mtime)
        except OSError:
            return newest_s

    def open(self, path: str) -> AbstractContextManager[int]:
        """Open a file for reading, as the same file that was seen; raises what ``opened_as_seen`` does."""
        if path in self._growing:
            return opened_as_seen(self._folder, self._growing[path], whose=self._folder.name, is_same=has_only_grown)
        return opened_as_seen(self._folder, self._seen[path], whose=self._folder.name)


def _sorted(files: list[FoundFile]) -> tuple[FoundFile, ...]:
    return tuple(sorted(files, key=lambda file: file.path))
