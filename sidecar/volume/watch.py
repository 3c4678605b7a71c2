"""Hints that something changed on the volume. Only hints: the rescan every second finds everything without them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog
from watchdog.events import (
    DirCreatedEvent,
    DirDeletedEvent,
    DirMovedEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver, ObservedWatch

from sidecar.volume.files import LASTING
from trainer_hook.contract import MARKER, SYSTEM_DIR, TERMINATING, is_checkpoint_name

log = structlog.get_logger()

MOST_FOLLOWED = 32
"""Checkpoints that are being written at once: each costs a thread. Of further ones, the rescan finds the marker."""
_INTERESTING = frozenset({MARKER, Path(TERMINATING).name})
# Not "opened", "modified" and "closed without writing": our own reading causes those, thousands of them.
_FILES: list[type[FileSystemEvent]] = [FileCreatedEvent, FileMovedEvent, FileClosedEvent, FileDeletedEvent]
_FOLDERS: list[type[FileSystemEvent]] = [DirCreatedEvent, DirMovedEvent, DirDeletedEvent]


class _OfFiles(FileSystemEventHandler):
    def __init__(self, wake: Callable[[], None], closed: Callable[[str], None]) -> None:
        self._wake = wake
        self._closed = closed

    def on_any_event(self, event: FileSystemEvent) -> None:
        paths = _paths(event)
        if any(os.path.basename(path) in _INTERESTING for path in paths):  # noqa: PTH119 - thousands of files
            self._wake()
        elif isinstance(event, FileClosedEvent | FileMovedEvent):
            self._closed(paths[-1])


class _OfFolders(FileSystemEventHandler):
    def __init__(self, appeared: Callable[[str], None], went: Callable[[str], None]) -> None:
        self._appeared = appeared
        self._went = went

    def on_any_event(self, event: FileSystemEvent) -> None:
        paths = _paths(event)
        if isinstance(event, DirDeletedEvent | DirMovedEvent):
            self._went(Path(paths[0]).name)
        if isinstance(event, DirCreatedEvent | DirMovedEvent):
            self._appeared(Path(paths[-1]).name)


class Hints:
    """Wakes the scanner early, where the kernel tells of changes.

    Only folders in which a checkpoint is being written are watched whole: for each file that we ourselves link, fetch or
    write elsewhere, the interpreter would be busy with what the kernel tells of it.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._woken = asyncio.Event()
        self._observer: BaseObserver | None = None
        self._of_files: _OfFiles | None = None
        self._is_short = False
        """Whether a checkpoint could not be watched for want of something, and it was said."""
        self._followed: dict[str, ObservedWatch] = {}
        """Of checkpoints that are being written, by name."""
        self._closing = threading.Lock()
        self._closed: dict[str, float] = {}

    def closed(self) -> dict[str, float]:
        """Return the files that were closed after writing, and when (epoch seconds), by absolute path."""
        with self._closing:
            return dict(self._closed)

    def forget(self, *names: str) -> None:
        """Checkpoints are finished, gone or of no use: do not watch them, and forget which of their files were closed."""
        for name in names:
            if (watch := self._followed.pop(name, None)) is not None and self._observer is not None:
                with contextlib.suppress(KeyError):
                    self._observer.unschedule(watch)
        inside = tuple(str(self._root / name) + os.sep for name in names)
        with self._closing:
            self._closed = {path: at_s for path, at_s in self._closed.items() if not path.startswith(inside)}

    def _note_closed(self, path: str) -> None:
        with self._closing:
            self._closed[path] = time.time()

    def start(self) -> None:
        """Begin. Where inotify's limits are reached (they are per user across the whole node), polling alone remains."""
        wake = self._from_thread(asyncio.get_running_loop())
        self._of_files = _OfFiles(wake, self._note_closed)

        def appeared(name: str) -> None:
            self.follow(name)
            wake()

        try:
            observer = Observer()
            try:
                observer.schedule(_OfFolders(appeared, self.forget), str(self._root), event_filter=_FOLDERS)
                observer.schedule(_OfFiles(wake, lambda _: None), str(self._root / SYSTEM_DIR), event_filter=_FILES)
                observer.start()
            except BaseException:
                observer.stop()
                raise
        except OSError as error:
            log.warning("watch_falls_back_to_polling", error=error.strerror, hint="raise fs.inotify.max_user_instances")
            return
        self._observer = observer
        with contextlib.suppress(OSError):  # the scan says so
            for place in self._root.iterdir():
                self.follow(place.name)

    def follow(self, *names: str) -> None:
        """Watch the files of checkpoints, unless they are finished, or watched already. From any thread."""
        for name in names:
            if name not in self._followed and is_checkpoint_name(name) and len(self._followed) < MOST_FOLLOWED:
                self._follow(name)

    def _follow(self, name: str) -> None:
        observer, handler, folder = self._observer, self._of_files, self._root / name
        if observer is None or handler is None or (folder / MARKER).exists():
            return
        try:
            self._followed[name] = observer.schedule(handler, str(folder), recursive=True, event_filter=_FILES)
        except OSError as error:
            if error.errno not in LASTING and not self._is_short:
                log.warning("watch_falls_back_to_polling", error=error.strerror, hint="raise fs.inotify.max_user_watches")
                self._is_short = True

    def _from_thread(self, loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
        def wake() -> None:
            loop.call_soon_threadsafe(self._woken.set)

        return wake

    async def wait(self, *, timeout_s: float) -> None:
        """Return at the next hint, or after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._woken.wait()
        except TimeoutError:
            return
        self._woken.clear()

    def wake(self) -> None:
        """Give a hint of our own."""
        self._woken.set()

    def stop(self) -> None:
        """End the watching thread."""
        if self._observer is not None:
            self._observer.stop()
            self._observer = None


def _paths(event: FileSystemEvent) -> list[str]:
    return [path for path in (os.fsdecode(event.src_path), os.fsdecode(event.dest_path)) if path]
