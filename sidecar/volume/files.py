"""Single files of checkpoints and of the contract, opened only if they are unchanged since they were found."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sidecar.core.format.found_checkpoint import FoundFile
from sidecar.errors import CheckpointChanged, CheckpointRejected, UnreadableFile
from sidecar.volume.descriptors import opened
from sidecar.volume.opener import NotRegular, Place
from trainer_hook.contract import MAX_MARKER_BYTES

PERMANENT_ERRORS = frozenset(
    {errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ENXIO, errno.ENODEV, errno.EXDEV}
)
"""Errors that are a property of the file, such as a link or a socket. Every other error, such as too many open files or a
stale handle, is transient: it says nothing about the checkpoint, which is examined again."""
DENIED = frozenset({errno.EACCES, errno.EPERM})
"""Errors of missing rights. Transient, too: somebody may give them, and the files are as they were finished."""

_SHOWN = 400
"""Most characters of a path in a message, from its beginning and its end."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a full volume, whose files can still be read, sent and deleted."""


def is_as_seen(status: os.stat_result, seen: FoundFile) -> bool:
    """Whether a status belongs to the same file, in the same version, that a walk found."""
    return (status.st_ino, status.st_size, status.st_mtime_ns) == (seen.inode, seen.size_bytes, seen.mtime_ns)


def has_only_grown(status: os.stat_result, seen: FoundFile) -> bool:
    """Whether a status belongs to the same file that a walk found; it may have grown."""
    return status.st_ino == seen.inode and status.st_size >= seen.size_bytes


@contextmanager
def opened_as_seen(
    place: Place, seen: FoundFile, *, whose: str, is_same: Callable[[os.stat_result, FoundFile], bool] = is_as_seen
) -> Iterator[int]:
    """Open a file of a checkpoint for reading; before and after, check that it is the file that a walk found.

    Args:
        place: Root directory of the walk.
        seen: The file as the walk found it.
        whose: The checkpoint's name, for messages.
        is_same: Compares a status with ``seen``.

    Raises:
        CheckpointChanged: It was rewritten or replaced since.
        CheckpointRejected: It is missing, or a link.
        UnreadableFile: It is not readable for this user.
        OSError: The volume failed; the file may be intact.
    """
    try:
        fd = (place / seen.path).open_file()
    except NotRegular as error:
        raise CheckpointRejected(f"{whose}/{seen.path} is not a regular file") from error
    except OSError as error:
        if error.errno in DENIED:
            raise UnreadableFile(why_refused(f"{whose}/{seen.path}", error)) from error
        if error.errno not in PERMANENT_ERRORS:
            raise
        raise CheckpointRejected(why_refused(f"{whose}/{seen.path}", error)) from error
    with opened(fd):
        _expect(is_same(os.fstat(fd), seen), seen, whose)
        yield fd
        _expect(is_same(os.fstat(fd), seen), seen, whose)


def read_small(place: Place) -> tuple[bytes, os.stat_result]:
    """Read a regular file, as far as a marker may reach, and its status.

    Raises:
        FileNotFoundError: It does not exist.
        CheckpointRejected: It is not a regular file, or lies behind a link or mount.
        OSError: The volume failed, or this user may not read it.
    """
    try:
        return place.read(max_bytes=MAX_MARKER_BYTES + 1)
    except NotRegular as error:
        raise CheckpointRejected(f"{place.name} is not a regular file") from error
    except OSError as error:
        if error.errno == errno.ENOENT or error.errno not in PERMANENT_ERRORS:
            raise
        raise CheckpointRejected(why_refused(place.name, error)) from error


def why_refused(path: str, error: OSError) -> str:
    """Return why a file on the volume cannot be used, and the remedy."""
    path = path if len(path) <= _SHOWN else f"{path[: _SHOWN // 2]}…{path[-_SHOWN // 2 :]}"  # the reason is worth more
    if error.errno in DENIED:
        return f"{path}: not readable for user {os.geteuid()}; run both containers as one user, or make it group-readable"
    if error.errno == errno.EXDEV:
        return f"{path}: on another mount; a checkpoint lies on the shared volume alone: copy the files into it"
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return f"{path}: a symbolic link is in the way; links are not followed: write the files themselves"
    return f"{path}: {error.strerror}"


def _expect(is_same: bool, seen: FoundFile, whose: str) -> None:
    if not is_same:
        raise CheckpointChanged(f"{whose}/{seen.path}")
