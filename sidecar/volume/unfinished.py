"""Files of a checkpoint that the trainer still writes: which can be read already, and opened as those that were seen."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from sidecar.core.local import FoundFile
from sidecar.volume.files import opened_as_seen
from trainer_hook.contract import ContractError, check_path

QUIET_S = 2.0
"""A file whose size and time stayed the same this long counts as closed, where nobody said so."""


def closed_files(folder: Path, closed: Mapping[str, float], *, quiet_only: bool = False) -> list[FoundFile]:
    """Return the regular files of a directory that nobody seems to write.

    Args:
        folder: The directory; may be changing, or gone.
        closed: When the kernel said that a path was closed after writing (epoch seconds), by absolute path.
        quiet_only: Believe only in time.
    """
    now_s = time.time()
    found = []
    for inside, _, names in os.walk(folder):
        for name in names:
            path = Path(inside, name)
            try:
                status = path.lstat()
                relative = check_path(path.relative_to(folder).as_posix())
            except (OSError, ContractError):
                continue
            is_quiet = now_s - max(status.st_mtime, status.st_ctime) > QUIET_S
            was_closed = not quiet_only and closed.get(str(path), 0.0) >= status.st_mtime
            if stat.S_ISREG(status.st_mode) and (is_quiet or was_closed):
                found.append(FoundFile(relative, status.st_size, status.st_mtime_ns, status.st_ino))
    return sorted(found, key=lambda file: file.path)


class Unfinished:
    """Opens files below a directory of which nothing is held."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, FoundFile] = {}

    def see(self, file: FoundFile) -> None:
        """Remember what a file is that will be opened."""
        self._seen[file.path] = file

    @property
    def size_bytes(self) -> int:
        """Sum of the files that were seen."""
        return sum(file.size_bytes for file in self._seen.values())

    @property
    def newest_mtime_s(self) -> float:
        """When something was last written, in epoch seconds: to a file that was seen, or to the directory."""
        newest_s = max((file.mtime_ns for file in self._seen.values()), default=0) / 1e9
        try:
            return max(newest_s, self._folder.stat().st_mtime)
        except OSError:
            return newest_s

    def open(self, path: str) -> AbstractContextManager[int]:
        """Open a file for reading, as the same file that was seen; raises what ``opened_as_seen`` does."""
        return opened_as_seen(self._folder, self._seen[path], whose=self._folder.name)
