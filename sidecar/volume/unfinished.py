"""Files of an unfinished checkpoint: which of them can be read already, and access to them while they are unchanged."""

from __future__ import annotations

import stat
import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from sidecar.core.format.found_checkpoint import FoundFile
from sidecar.volume.files import has_only_grown, opened_as_seen
from sidecar.volume.opener import Place
from sidecar.volume.refusals import Refusals, has_holes
from trainer_hook.contract import ContractError, check_path

QUIET_S = 2.0
"""Seconds without a change of size and time after which a file counts as closed, if no close event was seen."""
QUIET_GROWING_S = 60.0
"""The same for a file that was seen growing: a writer that waited for the disk or the GPU continues, and the part sent as the
end of the file would have to be sent again."""


@dataclass(frozen=True, slots=True)
class FilesSeen:
    """The regular files of a directory, in the order of their paths."""

    closed: tuple[FoundFile, ...]
    """Files that seem to be closed."""
    open: tuple[FoundFile, ...]
    """Files that are being written from the beginning on, without holes."""


def list_files(
    folder: Place, closed: Mapping[str, float], *, growing: Collection[str] = (), quiet_only: bool = False
) -> FilesSeen:
    """Return the present files of a directory, which may be changing, or deleted.

    Args:
        folder: The directory.
        closed: Times of close events after writing (epoch seconds), by absolute path.
        growing: Paths in the directory that were seen growing.
        quiet_only: Ignore close events; only time shows that a file is closed.
    """
    now_s = time.time()
    ended, being_written = [], []
    refusals = Refusals(Place(folder.folder, ""))
    for found, status in folder.walk(lenient=True):
        if not stat.S_ISREG(status.st_mode) or refusals.kind_of(status) is not None:
            continue
        try:
            path = check_path(found)
        except ContractError:
            continue
        file = FoundFile(path, status.st_size, status.st_mtime_ns, status.st_ino)
        closed_s = closed.get(f"{folder}/{path}")  # earlier than the last write if another machine's clock set the time
        quiet_s = QUIET_GROWING_S if path in growing and closed_s is None else QUIET_S
        is_quiet = now_s - max(status.st_mtime, status.st_ctime) > quiet_s
        was_closed = not quiet_only and closed_s is not None and closed_s >= status.st_mtime
        if is_quiet or was_closed:
            ended.append(file)
        elif not has_holes(status):  # otherwise it is not written from its beginning
            being_written.append(file)
    return FilesSeen(_sorted(ended), _sorted(being_written))


class Unfinished:
    """Opens files below a directory whose files are not pinned."""

    def __init__(self, folder: Place) -> None:
        self._folder = folder
        self._seen: dict[str, FoundFile] = {}
        self._growing: dict[str, FoundFile] = {}

    def see(self, file: FoundFile) -> None:
        """Record the version of a closed file that will be opened."""
        self._seen[file.path] = file
        self._growing.pop(file.path, None)

    def see_growing(self, file: FoundFile) -> None:
        """Record the identity of a growing file whose beginning will be read."""
        self._growing[file.path] = file
        self._seen.pop(file.path, None)

    @property
    def size_bytes(self) -> int:
        """Sum of the recorded files' sizes."""
        return sum(file.size_bytes for file in (*self._seen.values(), *self._growing.values()))

    @property
    def newest_mtime_s(self) -> float:
        """Time of the last write to a recorded file or to the directory, epoch seconds."""
        seen = (*self._seen.values(), *self._growing.values())
        newest_s = max((file.mtime_ns for file in seen), default=0) / 1e9
        try:
            return max(newest_s, self._folder.status().st_mtime)
        except OSError:
            return newest_s

    def open(self, path: str) -> AbstractContextManager[int]:
        """Open a recorded file for reading, if it is the same. Raises as ``opened_as_seen``."""
        if path in self._growing:
            return opened_as_seen(self._folder, self._growing[path], whose=self._folder.name, is_same=has_only_grown)
        return opened_as_seen(self._folder, self._seen[path], whose=self._folder.name)


def _sorted(files: list[FoundFile]) -> tuple[FoundFile, ...]:
    return tuple(sorted(files, key=lambda file: file.path))
