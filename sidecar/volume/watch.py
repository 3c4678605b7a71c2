"""Change notifications from the volume. They are only hints: the rescan every second finds everything without them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass

import structlog

from sidecar.tasks import within
from sidecar.volume import inotify
from sidecar.volume.files import DENIED, PERMANENT_ERRORS
from sidecar.volume.opener import Place
from sidecar.volume.volume import Volume
from trainer_hook.contract import MARKER, SYSTEM_DIR, TERMINATING, is_checkpoint_name

log = structlog.get_logger()

MOST_FOLLOWED = 32
"""Maximum number of unfinished checkpoints watched. For others, the rescan finds the marker."""
MOST_FOLDERS = 256
"""Maximum number of watched directories per checkpoint: the kernel's limit is shared with other programs on the node."""
MOST_CLOSED = 100_000
"""Maximum number of recorded close events; for other files, only time shows that they are closed."""
_INTERESTING = frozenset({MARKER, TERMINATING.rpartition("/")[2]})
# Not "opened", "modified" and "closed without writing": our own reading causes those, thousands of them.
_FILES = inotify.CREATE | inotify.MOVED_FROM | inotify.MOVED_TO | inotify.CLOSE_WRITE | inotify.DELETE
_FOLDERS = inotify.CREATE | inotify.MOVED_FROM | inotify.MOVED_TO | inotify.DELETE
_CLOSED = inotify.CLOSE_WRITE | inotify.MOVED_TO
_APPEARED = inotify.CREATE | inotify.MOVED_TO
_WENT = inotify.DELETE | inotify.MOVED_FROM


@dataclass(frozen=True, slots=True)
class _Watched:
    """A watched directory: name of its checkpoint (empty for the volume and ``.ckpt``), and its path on the volume."""

    checkpoint: str
    path: str


class Hints:
    """Wakes the scanner when the kernel reports a change. Used from the event loop alone.

    File events are watched only in directories of unfinished checkpoints. Elsewhere, events of the files that the sidecar
    itself links, fetches or writes would cost CPU time.
    """

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._woken = asyncio.Event()
        self._fd: int | None = None
        self._watched: dict[int, _Watched] = {}
        """Watched directories by watch number."""
        self._followed: set[str] = set()
        """Unfinished checkpoints that are watched."""
        self._is_short = False
        """Whether a checkpoint could not be watched, because a limit was reached, and this was logged."""
        self._closed: dict[str, float] = {}

    def closed(self) -> dict[str, float]:
        """Return the times of close events after writing (epoch seconds), by absolute path."""
        return dict(self._closed)

    def forget(self, *names: str) -> None:
        """Stop watching checkpoints that are finished, deleted or rejected, and drop their close events."""
        gone = self._followed.intersection(names)
        self._followed -= gone
        if gone:
            self._end([watch for watch, watched in self._watched.items() if watched.checkpoint in gone])
        inside = tuple(f"{self._volume.root / name}/" for name in names)
        self._closed = {path: at_s for path, at_s in self._closed.items() if not path.startswith(inside)}

    def start(self) -> None:
        """Start. If inotify's limits are reached (per user, across the node), only polling remains."""
        try:
            self._fd = inotify.init()
            self._watch("", "", _FOLDERS)
            self._watch("", SYSTEM_DIR, _FILES)
        except OSError as error:
            log.warning("watch_falls_back_to_polling", error=error.strerror, hint="raise fs.inotify.max_user_instances")
            self._close()
            return
        asyncio.get_running_loop().add_reader(self._fd, self._read)
        with contextlib.suppress(OSError):  # the scan says so
            self.follow(*self._volume.names())

    def follow(self, *names: str) -> None:
        """Watch the files of checkpoints, unless they are finished, or watched already."""
        for name in names:
            is_wanted = name not in self._followed and is_checkpoint_name(name) and len(self._followed) < MOST_FOLLOWED
            if is_wanted and self._fd is not None and self._volume.marker_version(name) is None:
                self._followed.add(name)
                if not self._watch_tree(name, name):
                    self._followed.discard(name)

    async def wait(self, *, timeout_s: float) -> None:
        """Wait for the next hint, at most ``timeout_s`` seconds."""
        if await within(timeout_s, self._woken.wait()):
            self._woken.clear()

    def wake(self) -> None:
        """Add a hint."""
        self._woken.set()

    def stop(self) -> None:
        """Stop watching."""
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
        self._close()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None
        self._watched.clear()
        self._followed.clear()

    def _watch(self, checkpoint: str, path: str, mask: int) -> None:
        assert self._fd is not None
        with self._place(path).held() as held:
            self._watched[inotify.add_watch(self._fd, held.fd, mask)] = _Watched(checkpoint, path)

    def _watch_tree(self, checkpoint: str, top: str) -> bool:
        """Watch a directory of a checkpoint and those below it. Returns False if a limit was reached."""
        left = [top]
        while left and sum(watched.checkpoint == checkpoint for watched in self._watched.values()) < MOST_FOLDERS:
            path = left.pop()
            try:
                self._watch(checkpoint, path, _FILES)
                left += [f"{path}/{name}" for name, is_folder in self._place(path).entries() if is_folder]
            except OSError as error:
                if error.errno not in PERMANENT_ERRORS | DENIED and not self._is_short:
                    log.warning("watch_falls_back_to_polling", error=error.strerror, hint="raise fs.inotify.max_user_watches")
                    self._is_short = True
                if path == top:
                    return False
        return True

    def _place(self, path: str) -> Place:
        return self._volume / path

    def _end(self, watches: list[int]) -> None:
        for watch in watches:
            del self._watched[watch]
            if self._fd is not None:
                inotify.remove_watch(self._fd, watch)

    def _read(self) -> None:
        assert self._fd is not None
        for event in inotify.read(self._fd):
            watched = self._watched.get(event.watch)
            if event.is_overflow:
                self.wake()
            elif event.has_ended:
                self._watched.pop(event.watch, None)
            elif watched is None:  # ended meanwhile
                continue
            elif event.is_folder:
                self._take_folder(watched, event)
            elif watched.path:
                self._take_file(watched, event)

    def _take_folder(self, watched: _Watched, event: inotify.InotifyEvent) -> None:
        if watched.checkpoint:
            self._take_inner_folder(watched.checkpoint, f"{watched.path}/{event.name}", event)
        elif not watched.path:
            if event.mask & _WENT:
                self.forget(event.name)
            else:
                self.follow(event.name)
                self.wake()

    def _take_inner_folder(self, checkpoint: str, path: str, event: inotify.InotifyEvent) -> None:
        if event.mask & _APPEARED:
            self._watch_tree(checkpoint, path)
        else:
            below = f"{path}/"
            self._end([n for n, watched in self._watched.items() if f"{watched.path}/".startswith(below)])

    def _take_file(self, watched: _Watched, event: inotify.InotifyEvent) -> None:
        if event.name in _INTERESTING:
            self.wake()
        elif watched.checkpoint and event.mask & _CLOSED and len(self._closed) < MOST_CLOSED:
            self._closed[str(self._volume.root / watched.path / event.name)] = time.time()
