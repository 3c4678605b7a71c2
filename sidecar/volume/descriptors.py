"""Work with open descriptors: close, write, and empty a directory."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sidecar.volume.resolve import open_beneath

FOLDER = os.O_RDONLY | os.O_DIRECTORY
_WITHOUT_MODES = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS})
_MOST_PASSES = 4096
"""Depth of a tree that is certainly removed by one call."""


@contextmanager
def opened(fd: int) -> Iterator[int]:
    """Close a descriptor at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def closed_on_error(fd: int) -> Iterator[int]:
    """Close a descriptor if the block raises; otherwise it stays open."""
    try:
        yield fd
    except BaseException:
        os.close(fd)
        raise


def set_mode(fd: int, mode: int) -> None:
    """Set permissions. Where a file system has none, as exFAT and SMB, the options of its mount say who may do what."""
    try:
        os.fchmod(fd, mode)
    except OSError as error:
        if error.errno not in _WITHOUT_MODES:
            raise


def write_all(fd: int, content: bytes) -> None:
    """Write all of ``content`` at the descriptor's position."""
    left = memoryview(content)
    while left:
        left = left[os.write(fd, left) :]


def remove_tree(folder: int, name: str) -> None:
    """Remove an entry of a directory, with all that is below it.

    Raises:
        OSError: A part could not be removed.
    """
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        with opened(open_beneath(folder, name, FOLDER)) as fd:
            empty(fd)
        os.rmdir(name, dir_fd=folder)


def empty(top: int) -> None:
    """Remove all entries of a directory, two levels at a time: deeper directories are moved up before they are removed."""
    for _ in range(_MOST_PASSES):
        is_changed = False
        for name, is_folder in _names(top):
            with suppress(OSError):
                if is_folder:
                    _remove_folder(top, name)
                else:
                    os.unlink(name, dir_fd=top)
                is_changed = True
        if not is_changed:
            return


def _remove_folder(top: int, name: str) -> None:
    with suppress(OSError):  # it is empty
        os.rmdir(name, dir_fd=top)
        return
    with opened(open_beneath(top, name, FOLDER)) as fd:
        for inner, is_folder in _names(fd):
            with suppress(OSError):
                if is_folder:
                    os.rename(inner, f".{uuid.uuid4().hex}", src_dir_fd=fd, dst_dir_fd=top)
                else:
                    os.unlink(inner, dir_fd=fd)
    os.rmdir(name, dir_fd=top)


def _names(fd: int) -> list[tuple[str, bool]]:
    # Another descriptor: reading a directory moves the position that all copies of one share.
    with opened(open_beneath(fd, "", FOLDER)) as own, os.scandir(own) as entries:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
