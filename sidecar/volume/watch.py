"""Hints that something changed on the volume. Only hints: the rescan every second finds everything without them."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog
from watchdog.events import (
    FileClosedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

from trainer_hook.contract import MARKER, SYSTEM_DIR, TERMINATING

log = structlog.get_logger()

_INTERESTING = frozenset({MARKER, Path(TERMINATING).name})
# Not "opened", "modified" and "closed without writing": our own reading and our journal cause those, thousands of them.
_CHANGES: list[type[FileSystemEvent]] = [FileCreatedEvent, FileMovedEvent, FileClosedEvent, FileDeletedEvent]


class _Wake(FileSystemEventHandler):
    def __init__(self, wake: Callable[[], None], closed: Callable[[str], None]) -> None:
        self._wake = wake
        self._closed = closed

    def on_any_event(self, event: FileSystemEvent) -> None:
        paths = [path for path in (os.fsdecode(event.src_path), os.fsdecode(event.dest_path)) if path]
        if any(os.path.basename(path) in _INTERESTING for path in paths):  # noqa: PTH119 - thousands of files
            self._wake()
        elif isinstance(event, FileClosedEvent | FileMovedEvent):
            self._closed(paths[-1])


class Hints:
    """Wakes the scanner early, where the kernel tells of changes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._woken = asyncio.Event()
        self._observer: BaseObserver | None = None
        self._own = str(root / SYSTEM_DIR) + os.sep
        self._closing = threading.Lock()
        self._closed: dict[str, float] = {}

    def closed(self) -> dict[str, float]:
        """Return the files that were closed after writing, and when (epoch seconds), by absolute path."""
        with self._closing:
            return dict(self._closed)

    def forget(self, folder: Path) -> None:
        """Forget which files of a directory were closed."""
        inside = str(folder) + os.sep
        with self._closing:
            self._closed = {path: at_s for path, at_s in self._closed.items() if not path.startswith(inside)}

    def _note_closed(self, path: str) -> None:
        if not path.startswith(self._own):
            with self._closing:
                self._closed[path] = time.time()

    def start(self) -> None:
        """Begin. Where inotify's limits are reached (they are per user across the whole node), polling alone remains."""
        loop = asyncio.get_running_loop()
        observer = Observer()
        wake = _Wake(self._from_thread(loop), self._note_closed)
        observer.schedule(wake, str(self._root), recursive=True, event_filter=_CHANGES)
        try:
            observer.start()
        except OSError as error:
            log.warning("watch_falls_back_to_polling", error=error.strerror, hint="raise fs.inotify.max_user_instances")
        else:
            self._observer = observer

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
