"""inotify(7): change events of directories, which are watched by descriptor, so that no path is followed."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_libc = ctypes.CDLL(None, use_errno=True)
_EVENT = struct.Struct("iIII")
"""Watch, mask, cookie, length of the name that follows. Source: inotify(7)."""
_BUFFER_BYTES = 8 << 10
"""Size of one read, some hundred events: many events do not block the event loop."""

CLOSE_WRITE = 0x008
MOVED_FROM = 0x040
MOVED_TO = 0x080
CREATE = 0x100
DELETE = 0x200
_OVERFLOW = 0x4000
_IGNORED = 0x8000
_IS_FOLDER = 0x4000_0000
_ONLY_FOLDERS = 0x0100_0000


@dataclass(frozen=True, slots=True)
class InotifyEvent:
    """A change of an entry of a watched directory."""

    watch: int
    mask: int
    name: str

    @property
    def is_folder(self) -> bool:
        """Whether the entry is a directory."""
        return bool(self.mask & _IS_FOLDER)

    @property
    def has_ended(self) -> bool:
        """Whether the watch has ended: the directory was deleted, or the watch removed."""
        return bool(self.mask & _IGNORED)

    @property
    def is_overflow(self) -> bool:
        """Whether events were lost; ``watch`` is -1 then."""
        return bool(self.mask & _OVERFLOW)


def init() -> int:
    """Return the non-blocking descriptor of a new instance.

    Raises:
        OSError: ``EMFILE``: this user has too many.
    """
    return _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))


def add_watch(fd: int, folder_fd: int, mask: int) -> int:
    """Watch a directory, and return the number of the watch: the same one if it is watched already.

    Raises:
        OSError: ``ENOSPC``: this user has too many watches. ``EACCES``: the directory cannot be read.
    """
    return _checked(_libc.inotify_add_watch(fd, b"/proc/self/fd/%d" % folder_fd, ctypes.c_uint32(mask | _ONLY_FOLDERS)))


def remove_watch(fd: int, watch: int) -> None:
    """Remove a watch; one that has ended is not an error."""
    _libc.inotify_rm_watch(fd, watch)


def read(fd: int) -> Iterator[InotifyEvent]:
    """Yield the available events without waiting."""
    try:
        content = os.read(fd, _BUFFER_BYTES)
    except BlockingIOError:
        return
    at = 0
    while at < len(content):
        watch, mask, _, length = _EVENT.unpack_from(content, at)
        at += _EVENT.size
        yield InotifyEvent(watch, mask, os.fsdecode(content[at : at + length].rstrip(b"\0")))
        at += length


def _checked(answer: int) -> int:
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return answer
