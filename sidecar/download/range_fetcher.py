"""Download of files in ranges, several concurrently; after a crash it continues with the missing ranges."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TypeVar

import structlog

from sidecar.core.format import checksum
from sidecar.core.format.manifest import FileEntry
from sidecar.download.partial_file import PartialFile, holds, write_at
from sidecar.errors import CorruptObject, NotFound, Stopped
from sidecar.store.protocol import Readable, Store
from sidecar.store.slice import BLOCK_BYTES
from sidecar.tasks import task_group
from sidecar.transfer.executor import StoreExecutor
from sidecar.transfer.request_batch import OVERTAKEN_AFTER_S, RequestBatch
from sidecar.volume.descriptors import opened
from sidecar.volume.opener import Place

log = structlog.get_logger()

T = TypeVar("T")
LARGE_BYTES = 1 << 20
LARGE_AT_ONCE = 4
FILES_AT_ONCE = 16
"""Maximum number of files downloaded concurrently; large ranges have a lower limit."""
PATIENCE_S = 2.0
"""Seconds to wait for threads that were told to end."""


class Damaged(Exception):
    """A file differs from its recorded checksum, or is missing."""

    def __init__(self, entry: FileEntry, error: CorruptObject | NotFound) -> None:
        super().__init__(str(error))
        self.entry = entry
        self.error = error


class RangeFetcher:
    """One download. ``folder`` holds the incomplete files, under names derived from their expected content.

    ``on_damage`` is awaited before a damaged file is fetched again; it raises to give up.
    """

    def __init__(
        self,
        store: Store,
        executor: StoreExecutor,
        folder: Place,
        on_progress: Callable[[int], None],
        on_damage: Callable[[FileEntry, CorruptObject | NotFound], Awaitable[None]],
    ) -> None:
        self._store = store
        self._on_damage = on_damage
        self._executor = executor
        self._folder = folder
        self._on_progress = on_progress
        self._threads = _Threads()
        self._requests = asyncio.Semaphore(min(FILES_AT_ONCE, executor.most))
        self._large = asyncio.Semaphore(min(LARGE_AT_ONCE, executor.most))
        self._folders: set[Place] = set()
        """Folders that were created."""

    async def fetch(self, entries: Iterable[FileEntry], place: Place) -> None:
        """Fetch the files that are missing below ``place``, and verify each by its checksum.

        Raises:
            StoreError: A request failed for good, or ``on_damage`` gave up.
            OSError: The volume is full or not writable.
        """
        small, large = deque[FileEntry](), deque[FileEntry]()
        for entry in entries:
            (small if entry.size_bytes <= LARGE_BYTES else large).append(entry)
        async with task_group() as workers:
            for _ in range(min(LARGE_AT_ONCE, len(large))):
                workers.create_task(self._fetch_large_files(large, place))
            for _ in range(min(FILES_AT_ONCE, self._executor.small.threads, len(small))):
                workers.create_task(self._fetch_small_files(small, place, workers))

    async def _fetch_large_files(self, left: deque[FileEntry], place: Place) -> None:
        while left:
            entry = left.popleft()
            if await self._executor.in_thread(self._threads.counted(holds), place / entry.path, entry):
                self._on_progress(entry.size_bytes)
            else:
                await self._fetch_large_file(entry, place / entry.path)

    async def _fetch_small_files(self, left: deque[FileEntry], place: Place, workers: asyncio.TaskGroup) -> None:
        is_late = False

        def another() -> None:
            """Start another worker, so that the files left do not wait for a late answer."""
            nonlocal is_late
            is_late = True
            worker = self._fetch_small_files(left, place, workers)
            try:
                workers.create_task(worker)
            except RuntimeError:  # the download has failed
                worker.close()

        again: list[FileEntry] = []  # each worker retries its own files: requests grow with time, not with the damage
        while again or (left and not is_late):
            async with self._requests, self._further_slots() as further:
                files = _SmallFiles(left, at_once=1 + further, taken=again)
                late = asyncio.get_running_loop().call_later(OVERTAKEN_AFTER_S, another)
                damaged = None
                try:
                    await self._executor.persistently(self._threads.counted(self._fetch_in_turn), files, place)
                except Damaged as found:
                    damaged = found
                finally:
                    late.cancel()
            self._on_progress(files.done_bytes)
            again = []
            if damaged is not None:
                again = [*(entry for entry in files.left if entry is not damaged.entry), damaged.entry]
                await self._on_damage(damaged.entry, damaged.error)

    @asynccontextmanager
    async def _further_slots(self) -> AsyncIterator[int]:
        """Take free slots for further requests, up to a thread's number of requests in flight."""
        taken = 0
        try:
            while taken < self._executor.small.at_once - 1 and not self._requests.locked():
                await self._requests.acquire()
                taken += 1
            yield taken
        finally:
            for _ in range(taken):
                self._requests.release()

    def _fetch_in_turn(self, files: _SmallFiles, place: Place) -> None:
        """Fetch small files in one thread for a short time: a thread switch per file would cost more than the file."""

        def arrived(entry: FileEntry, content: memoryview | None) -> None:
            if content is not None:
                self._write_small(entry, place / entry.path, content)
            files.done_bytes += entry.size_bytes

        files.run(lambda entry: self._asking(entry, place / entry.path), arrived)

    @contextmanager
    def _asking(self, entry: FileEntry, target: Place) -> Iterator[Callable[[], memoryview | None]]:
        """Request a small file; the function yielded returns its content, or ``None`` if the file is stored already."""
        if holds(target, entry):
            yield lambda: None
        elif entry.size_bytes == 0:
            yield lambda: memoryview(b"")
        else:
            with _damage_named(entry), self._store.reading(entry.key, length=entry.size_bytes) as answered:
                yield lambda: _content(answered(), entry.size_bytes)

    def _write_small(self, entry: FileEntry, target: Place, content: memoryview) -> None:
        if damaged := _difference(entry, checksum.checksum(content)):
            raise Damaged(entry, damaged)
        self._threads.check()
        if target.parent not in self._folders:
            target.parent.make_folder()
            self._folders.add(target.parent)
        # Not atomically: nobody reads the folder before it is complete, and after a crash all files are verified again.
        with opened(target.create(0o664)) as fd:
            write_at(fd, content, 0)

    async def _fetch_large_file(self, entry: FileEntry, target: Place) -> None:
        while True:
            partial = await self._executor.in_thread(self._threads.counted(PartialFile.prepare), self._folder, entry)
            self._on_progress(partial.done_bytes)
            damaged = await self._fetch_missing(partial) or _difference(entry, partial.crc())
            if damaged is None:
                target.parent.make_folder()
                partial.move(target)
                return
            self._on_progress(-partial.done_bytes)
            partial.discard()
            await self._on_damage(entry, damaged)

    async def end(self) -> None:
        """Stop the threads and wait for them; a folder that a late thread still writes to is renamed."""
        if not await self._threads.ended(patience_s=PATIENCE_S) and self._folder.is_folder():
            log.warning("download_threads_are_late", hint="the store stalls; what they were fetching is fetched again")
            self._folder.rename(self._folder.with_name(f"abandoned-{uuid.uuid4().hex[:8]}"))

    async def _fetch_missing(self, partial: PartialFile) -> CorruptObject | NotFound | None:
        """Fetch all missing ranges. Returns the damage of one, if any; no range is in flight then."""
        damaged: list[Damaged] = []
        async with task_group() as ranges:
            for offset, length in partial.missing():
                await self._large.acquire()
                if damaged:
                    self._large.release()
                    break
                ranges.create_task(self._fetch_range(partial, offset, length, damaged))
        return damaged[0].error if damaged else None

    async def _fetch_range(self, partial: PartialFile, offset: int, length: int, damaged: list[Damaged]) -> None:
        try:
            async with self._requests:
                crc = await self._executor.persistently(self._threads.counted(self._read), partial, _Range(offset, length))
        except Damaged as found:
            damaged.append(found)
            return
        finally:
            self._large.release()
        partial.arrived(offset, length, crc)
        self._on_progress(length)

    def _read(self, partial: PartialFile, part: _Range) -> int:
        """Write a range to the file and return the CRC64NVME of the bytes received; a retry continues after those."""
        entry, end = partial.entry, part.offset + part.length
        buffer = memoryview(bytearray(min(BLOCK_BYTES, max(1, part.length))))
        # The thread has its own descriptor, because it may outlive the request.
        with (
            _damage_named(entry),
            partial.opened() as fd,
            self._store.read(entry.key, offset=part.next, length=end - part.next) as body,
        ):
            while part.next < end:
                self._threads.check()
                self._executor.gate.check()
                count = body.readinto(buffer[: min(len(buffer), end - part.next)])
                if count == 0:
                    raise CorruptObject(entry.key, want=f"bytes from {part.offset} to {end}", got=f"ended at {part.next}")
                write_at(fd, buffer[:count], part.next)
                part.crc, part.next = checksum.checksum(buffer[:count], part.crc), part.next + count
        return part.crc


class _Range:
    """A range that is being fetched. A connection may last for less time than all of it takes."""

    def __init__(self, offset: int, length: int) -> None:
        self.offset = offset
        self.length = length
        self.next = offset
        """Offset of the first byte that has not come, and the checksum of those before: ``crc``."""
        self.crc = 0


class _SmallFiles(RequestBatch[FileEntry]):
    """One thread's share of the small files left."""

    def __init__(self, left: deque[FileEntry], *, at_once: int, taken: Iterable[FileEntry]) -> None:
        def more() -> FileEntry | None:
            with suppress(IndexError):  # other threads take from it, too
                return left.popleft()
            return None

        super().__init__(more, at_once=at_once, taken=taken)
        self.done_bytes = 0


@contextmanager
def _damage_named(entry: FileEntry) -> Iterator[None]:
    """Turn a store's error about an object into ``Damaged``, so that it is judged and not only retried."""
    try:
        yield
    except (CorruptObject, NotFound) as error:
        raise Damaged(entry, error) from None


def _difference(entry: FileEntry, crc: int) -> CorruptObject | None:
    if (got := checksum.to_text(crc)) == entry.crc64nvme:
        return None
    return CorruptObject(entry.key, want=f"crc64nvme {entry.crc64nvme}", got=f"crc64nvme {got}")


def _content(body: Readable, size_bytes: int) -> memoryview:
    content, done = memoryview(bytearray(size_bytes)), 0
    while done < size_bytes and (count := body.readinto(content[done:])):
        done += count
    return content


class _Threads:
    """Running threads of one download, with their stop flag."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._stopped = False

    def counted(self, call: Callable[..., T]) -> Callable[..., T]:
        """Return the call, wrapped so that it counts as a running thread."""

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
        """Raise ``Stopped`` if the download has been stopped."""
        if self._stopped:
            raise Stopped("the download was stopped")

    async def ended(self, *, patience_s: float) -> bool:
        """Stop all threads, and return whether they ended within ``patience_s`` seconds."""
        with self._lock:
            self._stopped = True
        for _ in range(int(patience_s / 0.02)):
            if not self._running:
                return True
            await asyncio.sleep(0.02)
        return not self._running
