"""Atomic publication of a file on the shared volume, and the folders that both containers write to."""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import time
from pathlib import Path

from trainer_hook import contract
from trainer_hook.volume.retry import FULL, retried


def publish(path: Path, content: bytes, *, durable: bool = False, group: int | None = None, not_before_ns: int = 0) -> None:
    """Write a file by temp file and rename.

    ``durable``: also fsync file and directory; data files need no fsync, because the sidecar reads through the same page cache.
    ``group``: if it is the file's group, it may write to the file. ``not_before_ns``: lower bound of the modification time, in
    epoch nanoseconds.

    Raises ``OSError``: the file is as before.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns():x}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o664)
        with os.fdopen(fd, "wb") as file:
            if (status := os.fstat(fd)).st_gid == group:
                os.fchmod(fd, status.st_mode | stat.S_IWGRP)
            file.write(content)
            file.flush()
            if os.fstat(fd).st_mtime_ns < not_before_ns:
                with contextlib.suppress(OSError):  # a file system that cannot set times
                    os.utime(fd, ns=(not_before_ns, not_before_ns))
            if durable:
                os.fsync(fd)
        temporary.replace(path)
    except BaseException:  # SystemExit of a signal, too: the file would count as one of the checkpoint's
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def publish_awaited(path: Path, content: bytes) -> None:
    """Publish a small file that the sidecar waits for, in spite of errors that pass: on a full one in place.

    Raises ``OSError``: the file is as before.
    """
    try:
        retried(functools.partial(publish, path, content))
    except OSError as error:
        if error.errno not in FULL:
            raise
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)  # it has its block; a reader that sees half of it reads again
        try:
            os.pwrite(fd, content, 0)
            os.ftruncate(fd, len(content))
        finally:
            os.close(fd)


def is_there(volume: Path) -> bool:
    """Whether the volume is mounted. True also where that cannot be seen now: the error may pass."""
    try:
        return stat.S_ISDIR(volume.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def make_system_folders(volume: Path) -> None:
    """Create the folders that both containers write to, writable for a sidecar of another user in this group.

    Raises ``OSError``: the volume is not writable, or not there.
    """
    for path, mode in ((contract.SYSTEM_DIR, 0o2775), (contract.LEASES, 0o2777)):
        (volume / path).mkdir(exist_ok=True)  # never the volume itself: that would hide a missing mount
        add_mode(volume / path, mode)


def add_mode(path: Path, mode: int, *, group: int | None = None) -> None:
    """Add permissions to a path; if ``group`` is its group, write access for the group, too. Errors are ignored."""
    try:
        status = path.lstat()
        there = status.st_mode & 0o7777
        if status.st_gid == group:
            mode |= stat.S_IWGRP
        if there | mode != there and not path.is_symlink():
            path.chmod(there | mode)
    except OSError:
        return
