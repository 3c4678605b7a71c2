"""Fetches files in ranges, several at once, and continues after a crash with the ranges that are there."""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import structlog

from sidecar.core import checksum
from sidecar.core.manifest import FileEntry
from sidecar.errors import CorruptObject, Stopped
from sidecar.resume.partial import Partial, holds, write_at
from sidecar.store.protocol import Readable, Store
from sidecar.store.slice import BLOCK_BYTES
from sidecar.transfer import CORRUPT_TRIES, Transfers
from sidecar.turns import LATE_S, Turn

log = structlog.get_logger()

T = TypeVar("T")
LARGE_BYTES = 1 << 20
LARGE_AT_ONCE = 4
FILES_AT_ONCE = 16
"""Of large ranges fewer are fetched at once."""
PATIENCE_S = 2.0
"""How long threads are waited for that should end."""


class Fetching:
    """One download. ``folder`` holds what is not whole yet, under names made of what the content must be."""

    def __init__(self, store: Store, transfers: Transfers, folder: Path, on_progress: Callable[[int], None]) -> None:
        self._store = store
        self._transfers = transfers
        self._folder = folder
        self._on_progress = on_progress
        self._threads = _Threads()
        self._requests = asyncio.Semaphore(min(FILES_AT_ONCE, transfers.most))
        self._large = asyncio.Semaphore(min(LARGE_AT_ONCE, transfers.most))
        self._folders: set[Path] = set()
        """Those that were made."""

    async def fetch(self, entries: Iterable[FileEntry], place: Path) -> None:
        """Fetch files, unless they are there, compare each with its checksum and put it below ``place``.

        Raises:
            CorruptObject: One is something else, also when fetched again.
            NotFound: One disappeared.
            OSError: The volume is full or not writable.
        """
        small, large = deque[FileEntry](), deque[FileEntry]()
        for entry in entries:
            (small if entry.size_bytes <= LARGE_BYTES else large).append(entry)
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(LARGE_AT_ONCE, len(large))):
                workers.create_task(self._fetch_large_files(large, place))
            for _ in range(min(FILES_AT_ONCE, self._transfers.small.threads, len(small))):
                workers.create_task(self._fetch_small_files(small, place, workers))

    async def _fetch_large_files(self, left: deque[FileEntry], place: Path) -> None:
        while left:
            entry = left.popleft()
            if await self._transfers.once(self._threads.counted(holds), place / entry.path, entry):
                self._on_progress(entry.size_bytes)
            else:
                await self._fetch_large_file(entry, place / entry.path)

    async def _fetch_small_files(self, left: deque[FileEntry], place: Path, workers: asyncio.TaskGroup) -> None:
        is_late = False

        def another() -> None:
            """Do not let those that are left wait for one that hangs on an answer."""
            nonlocal is_late
            is_late = True
            worker = self._fetch_small_files(left, place, workers)
            try:
                workers.create_task(worker)
            except RuntimeError:  # the download has failed
                worker.close()

        while left and not is_late:
            async with self._requests, self._further_places() as places:
                files = _SmallFiles(left, at_once=1 + places)
                late = asyncio.get_running_loop().call_later(LATE_S, another)
                try:
                    await self._transfers.persistently(self._threads.counted(self._fetch_in_turn), files, place)
                finally:
                    late.cancel()
            self._on_progress(files.done_bytes)

    @asynccontextmanager
    async def _further_places(self) -> AsyncIterator[int]:
        """Take the places of further requests, as many as one thread has under way, where they are free."""
        taken = 0
        try:
            while taken < self._transfers.small.at_once - 1 and not self._requests.locked():
                await self._requests.acquire()
                taken += 1
            yield taken
        finally:
            for _ in range(taken):
                self._requests.release()

    def _fetch_in_turn(self, files: _SmallFiles, place: Path) -> None:
        """Fetch small files for a moment: all in one thread, as going from one to the other would cost more than the file."""

        def arrived(entry: FileEntry, content: memoryview | None) -> None:
            if content is not None:
                self._write_small(entry, place / entry.path, content)
            files.done_bytes += entry.size_bytes

        files.run(lambda entry: self._asking(entry, place / entry.path), arrived)

    @contextmanager
    def _asking(self, entry: FileEntry, target: Path) -> Iterator[Callable[[], memoryview | None]]:
        """Ask for a small file; what this yields returns its content, or ``None`` if it is there already."""
        if holds(target, entry):
            yield lambda: None
        elif entry.size_bytes == 0:
            yield lambda: memoryview(b"")
        else:
            with self._store.reading(entry.key, length=entry.size_bytes) as answered:
                yield lambda: _content(answered(), entry.size_bytes)

    def _write_small(self, entry: FileEntry, target: Path, content: memoryview) -> None:
        if (got := checksum.to_text(checksum.checksum(content))) != entry.crc64nvme:
            raise CorruptObject(entry.key, want=f"crc64nvme {entry.crc64nvme}", got=f"crc64nvme {got}")
        self._threads.check()
        if target.parent not in self._folders:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._folders.add(target.parent)
        # Not in one piece: nobody looks here before all is there, and what is there is compared again after a crash.
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o664)
        try:
            write_at(fd, content, 0)
        finally:
            os.close(fd)

    async def _fetch_large_file(self, entry: FileEntry, target: Path) -> None:
        for _ in range(CORRUPT_TRIES):
            partial = await self._transfers.once(self._threads.counted(Partial.prepare), self._folder, entry)
            self._on_progress(partial.done_bytes)
            await self._fetch_missing(partial)
            crc = partial.crc()
            if checksum.to_text(crc) == entry.crc64nvme:
                target.parent.mkdir(parents=True, exist_ok=True)
                partial.move(target)
                return
            partial.discard()
            self._on_progress(-entry.size_bytes)
        want, got = f"crc64nvme {entry.crc64nvme}", f"crc64nvme {checksum.to_text(crc)}"
        raise CorruptObject(entry.key, want=want, got=got)

    async def end(self) -> None:
        """Tell threads to end and wait for them; what a late one still writes to is put out of reach."""
        if not await self._threads.ended(patience_s=PATIENCE_S) and self._folder.exists():
            log.warning("download_threads_are_late", hint="the store stalls; what they were fetching is fetched again")
            self._folder.rename(self._folder.with_name(f"abandoned-{uuid.uuid4().hex[:8]}"))

    async def _fetch_missing(self, partial: Partial) -> None:
        async with asyncio.TaskGroup() as ranges:
            for offset, length in partial.missing():
                await self._large.acquire()
                ranges.create_task(self._fetch_range(partial, offset, length))

    async def _fetch_range(self, partial: Partial, offset: int, length: int) -> None:
        try:
            async with self._requests:
                crc = await self._transfers.persistently(self._threads.counted(self._read), partial, offset, length)
        finally:
            self._large.release()
        partial.arrived(offset, length, crc)
        self._on_progress(length)

    def _read(self, partial: Partial, offset: int, length: int) -> int:
        """Write a range to the file and return the CRC64NVME of what came."""
        crc, done, entry = 0, 0, partial.entry
        buffer = memoryview(bytearray(min(BLOCK_BYTES, max(1, length))))
        # The thread has a descriptor of its own: it may outlive whoever asked.
        with partial.opened() as fd, self._store.read(entry.key, offset=offset, length=length) as body:
            while done < length:
                self._threads.check()
                self._transfers.gate.check()
                count = body.readinto(buffer[: min(len(buffer), length - done)])
                if count == 0:
                    raise CorruptObject(entry.key, want=f"{length} bytes from {offset} on", got=f"ended after {done}")
                crc = checksum.checksum(buffer[:count], crc)
                write_at(fd, buffer[:count], offset + done)
                done += count
        return crc


class _SmallFiles(Turn[FileEntry]):
    """One thread's share of what is left."""

    def __init__(self, left: deque[FileEntry], *, at_once: int) -> None:
        def more() -> FileEntry | None:
            with suppress(IndexError):  # other threads take, too
                return left.popleft()
            return None

        super().__init__(more, at_once=at_once)
        self.done_bytes = 0


def _content(body: Readable, size_bytes: int) -> memoryview:
    content, done = memoryview(bytearray(size_bytes)), 0
    while done < size_bytes and (count := body.readinto(content[done:])):
        done += count
    return content


class _Threads:
    """Counts the threads of one download, and tells them to end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._stopped = False

    def counted(self, call: Callable[..., T]) -> Callable[..., T]:
        """Return the call as one that is counted while it runs."""

        def run(*args: object) -> T:
            with self._lock:
                if self._stopped:
                    raise Stopped("the download was stopped")
                self._running += 1
            try:
                return call(*args)
            finally:
                with self._lock:
                    self._running -= 1

        return run

    def check(self) -> None:
        """Raise ``Stopped`` once the download ends."""
        if self._stopped:
            raise Stopped("the download was stopped")

    async def ended(self, *, patience_s: float) -> bool:
        """Tell all to end, and return whether they have."""
        with self._lock:
            self._stopped = True
        for _ in range(int(patience_s / 0.02)):
            if not self._running:
                return True
            await asyncio.sleep(0.02)
        return not self._running
