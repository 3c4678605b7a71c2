"""Looking at a checkpoint's directory without following anything in it: walked by descriptor."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from sidecar.core.local import FoundCheckpoint, FoundFile, FoundMarker
from sidecar.errors import CheckpointRejected
from sidecar.volume.files import LASTING, read_regular
from trainer_hook.contract import MARKER, MAX_MARKER_BYTES

_KINDS = {
    stat.S_IFLNK: "symbolic link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFBLK: "device",
    stat.S_IFCHR: "device",
}


def examine(place: Path, name: str) -> FoundCheckpoint:
    """Read a checkpoint's marker and walk its files.

    Raises:
        CheckpointRejected: The marker cannot be read or is no regular file.
        FileNotFoundError: There is no marker, or the directory is just being deleted.
        OSError: The volume is in trouble; the checkpoint may be sound.
    """
    content, status = read_regular(place / MARKER, max_bytes=MAX_MARKER_BYTES + 1)
    files: list[FoundFile] = []
    irregular: list[tuple[str, str]] = []
    for folder, _, file_names, folder_fd in os.fwalk(place, follow_symlinks=False, onerror=_raise):
        inside = Path(folder).relative_to(place).as_posix()
        for entry in [*file_names, *_linked_folders(folder_fd)]:
            path = entry if inside == "." else f"{inside}/{entry}"
            found = os.stat(entry, dir_fd=folder_fd, follow_symlinks=False)
            if stat.S_ISREG(found.st_mode):
                if path != MARKER:
                    files.append(FoundFile(path, found.st_size, found.st_mtime_ns, found.st_ino))
            elif not stat.S_ISDIR(found.st_mode):
                irregular.append((path, _KINDS.get(stat.S_IFMT(found.st_mode), "special file")))
    files.sort(key=lambda file: file.path)
    marker = FoundMarker(content, signature(status), status.st_mtime_ns)
    return FoundCheckpoint(name, tuple(files), tuple(sorted(set(irregular))), marker)


def signature(status: os.stat_result) -> str:
    """Return what names one version of a file."""
    return f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"


def newest_mtime(place: Path) -> float:
    """Return when anything in a directory was last written to, in epoch seconds; 0 when it is gone."""
    newest = 0.0
    for folder, _, file_names in os.walk(place):
        for path in [Path(folder), *(Path(folder, name) for name in file_names)]:
            try:
                newest = max(newest, os.lstat(path).st_mtime)
            except OSError:
                continue
    return newest


def _linked_folders(folder_fd: int) -> list[str]:
    # fwalk lists a link to a directory among the directories and does not enter it.
    with os.scandir(folder_fd) as entries:
        return [e.name for e in entries if e.is_symlink() and e.is_dir()]


def _raise(error: OSError) -> None:
    if error.errno == errno.ENOENT or error.errno not in LASTING:
        raise error
    raise CheckpointRejected(f"{error.filename}: {error.strerror}; run both containers as one user or group") from error
