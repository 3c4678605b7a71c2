"""Walk of a checkpoint's directory without following links."""

from __future__ import annotations

import errno
import os
import stat

from sidecar.core.format.found_checkpoint import FoundCheckpoint, FoundFile, FoundMarker
from sidecar.errors import CheckpointRejected
from sidecar.volume.files import PERMANENT_ERRORS, read_small, why_refused
from sidecar.volume.opener import Place
from sidecar.volume.refusals import Refusals
from trainer_hook.contract import MARKER, version_of

_KINDS = {
    stat.S_IFLNK: "symbolic link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFBLK: "device",
    stat.S_IFCHR: "device",
}


def examine(place: Place, name: str) -> FoundCheckpoint:
    """Read a checkpoint's marker and walk its files, through one open directory.

    Raises:
        CheckpointRejected: The marker is no regular file, or part of it lies on another mount.
        FileNotFoundError: There is no marker, or the directory is just being deleted.
        OSError: The volume failed, or this user may not read there; the checkpoint may be intact.
    """
    try:
        with place.held() as held:
            return _examine(held / "", name, Refusals(Place(place.folder, "")))
    except OSError as error:
        if error.errno == errno.ENOENT or error.errno not in PERMANENT_ERRORS:
            raise
        raise CheckpointRejected(why_refused(str(error.filename or name), error)) from error


def _examine(place: Place, name: str, refusals: Refusals) -> FoundCheckpoint:
    content, status = read_small(place / MARKER)
    marker = FoundMarker(content, version_at(status), status.st_mtime_ns, status.st_ctime_ns)
    if (kind := refusals.kind_of(status)) is not None:
        raise CheckpointRejected(f"{MARKER} is a {kind}: write a file of its own")
    folders = [place]
    files, irregular = walk_files(place, refusals, folders)
    # After the walk: what left a directory before it was listed shows in its time.
    return FoundCheckpoint(name, files, irregular, marker, max(folder.status().st_mtime_ns for folder in folders))


def walk_files(
    place: Place, refusals: Refusals | None = None, folders: list[Place] | None = None
) -> tuple[tuple[FoundFile, ...], tuple[tuple[str, str], ...]]:
    """Return the regular files of a directory but for its marker, and its other entries with their kind; in order of path.

    ``refusals``: regular files that count as other entries. ``folders``: gets the directories below it.

    Raises:
        OSError: The directory is missing, or cannot be read.
    """
    files: list[FoundFile] = []
    irregular: list[tuple[str, str]] = []
    for path, found in place.walk():
        if stat.S_ISREG(found.st_mode):
            if refusals is not None and (kind := refusals.kind_of(found)) is not None:
                irregular.append((path, kind))
            elif path != MARKER:
                files.append(FoundFile(path, found.st_size, found.st_mtime_ns, found.st_ino))
        elif stat.S_ISDIR(found.st_mode):
            if folders is not None:
                folders.append(place / path)
        else:
            irregular.append((path, _KINDS.get(stat.S_IFMT(found.st_mode), "special file")))
    files.sort(key=lambda file: file.path)
    return tuple(files), tuple(sorted(irregular))


def version_at(status: os.stat_result) -> str:
    """Return the version of a file: it changes when the file is written or replaced."""
    return version_of(status.st_ino, status.st_size, status.st_mtime_ns)


def written_at_s(version: str) -> float:
    """Return when a file of this version was written, in epoch seconds."""
    return int(version.rpartition("-")[2], 16) / 1e9


def newest_mtime(place: Place) -> float:
    """Return when anything in a directory was last written to, in epoch seconds; 0 when it is gone."""
    newest = max((status.st_mtime for _, status in place.walk(lenient=True)), default=0.0)
    try:
        return max(newest, place.status().st_mtime)
    except OSError:
        return newest
