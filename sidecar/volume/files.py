"""Single files on the shared volume: opened as what was seen, read small, written whole.

Every path below the volume is written by a container with fewer rights than ours, so nothing is followed: files are opened
with ``O_NOFOLLOW`` and compared with the inode that the walk saw.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sidecar.core.local import FoundFile
from sidecar.errors import CheckpointChanged, CheckpointRejected

LASTING = frozenset(
    {
        errno.ENOENT,
        errno.EACCES,
        errno.EPERM,
        errno.ELOOP,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENAMETOOLONG,
        errno.ENXIO,
        errno.ENODEV,
    }
)
"""Errors that are a property of the file, such as a link or a socket. Every other one, such as too many open files or a
stale handle, is trouble of a moment: it says nothing about the checkpoint, which is looked at again."""


def publish(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write a file whole or not at all: temp file beside it, fsync, rename, fsync of the directory.

    Raises:
        OSError: The volume is full or not writable; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(fd)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames in a directory survive a crash of the machine."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_as_seen(status: os.stat_result, seen: FoundFile) -> bool:
    """Whether a status is that of the file, in the version, that a walk saw."""
    return (status.st_ino, status.st_size, status.st_mtime_ns) == (seen.inode, seen.size_bytes, seen.mtime_ns)


def has_only_grown(status: os.stat_result, seen: FoundFile) -> bool:
    """Whether a status is that of the file that a walk saw, which may have become longer."""
    return status.st_ino == seen.inode and status.st_size >= seen.size_bytes


@contextmanager
def opened_as_seen(
    place: Path, seen: FoundFile, *, whose: str, is_same: Callable[[os.stat_result, FoundFile], bool] = is_as_seen
) -> Iterator[int]:
    """Open a file of a checkpoint for reading, as the same file that a walk saw, before and after.

    Args:
        place: The directory that the walk began in.
        seen: What the walk saw.
        whose: The checkpoint's name, for messages.
        is_same: Says by its status whether a file is still what the walk saw.

    Raises:
        CheckpointChanged: It was rewritten or replaced since.
        CheckpointRejected: It is gone, not readable for this user, or a link.
        OSError: The volume is in trouble; the file may be sound.
    """
    try:
        fd = os.open(place / seen.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in LASTING:
            raise
        raise CheckpointRejected(_cannot_read(f"{whose}/{seen.path}", error)) from error
    try:
        _expect(is_same(os.fstat(fd), seen), seen, whose)
        yield fd
        _expect(is_same(os.fstat(fd), seen), seen, whose)
    finally:
        os.close(fd)


def read_regular(path: Path, *, max_bytes: int) -> tuple[bytes, os.stat_result]:
    """Read the beginning of a regular file, and its status.

    Raises:
        FileNotFoundError: It is not there.
        CheckpointRejected: It is not a regular file, or cannot be read by this user.
        OSError: The volume is in trouble.
    """
    fd = _open_regular(path)
    try:
        return os.read(fd, max_bytes), os.fstat(fd)
    finally:
        os.close(fd)


def _expect(is_same: bool, seen: FoundFile, whose: str) -> None:
    if not is_same:
        raise CheckpointChanged(f"{whose}/{seen.path}")


def _open_regular(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENOENT or error.errno not in LASTING:
            raise
        raise CheckpointRejected(f"{path.name}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointRejected(f"{path.name} is not a regular file")
    return fd


def _cannot_read(path: str, error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{path}: not readable for user {os.geteuid()}; run both containers as one user, or make it group-readable"
    return f"{path}: {error.strerror}"
