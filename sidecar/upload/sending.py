"""One checkpoint on its way: which pieces are left, how each is carried, and when all are there."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeVar

from sidecar.core import checksum, keys
from sidecar.core.local import FoundFile
from sidecar.core.manifest import FileEntry
from sidecar.core.parts import part_ranges, part_size
from sidecar.errors import CorruptObject, NotFound, StoreError
from sidecar.store.protocol import Capabilities, Store, Stored, Verification
from sidecar.transfer import CORRUPT_TRIES, Standing, Transfers
from sidecar.upload.bodies import Bodies, Range
from sidecar.upload.journal import FileProgress, Journal
from sidecar.upload.small import SmallFiles
from sidecar.upload.unchanged import Known, Unchanged

T = TypeVar("T")
SMALL_BYTES = 1 << 20
"""Requests up to this size cost time for their round trip, not for their bytes: many may run at once."""


class Step(Enum):
    """What is done with a piece."""

    CONFIRM = auto()
    """Compare a file that was sent early with what it is now."""
    COMPARE = auto()
    """Compare a file with the one of the newest committed checkpoint, and copy that if they are the same."""
    WHOLE = auto()
    PART = auto()
    JOIN = auto()


@dataclass(slots=True)
class Upload:
    """One file on its way."""

    file: FoundFile
    key: str
    part_bytes: int
    ranges: list[Range]
    known: Known | None = None
    begin: asyncio.Lock | None = None
    """Of files in parts, while one of them begins the upload."""
    is_growing: bool = False
    """More is being written: these are only the whole parts in its beginning."""
    under_way: set[int] = field(default_factory=set)
    """Numbers of the parts that are queued or carried."""


@dataclass(slots=True)
class Piece:
    """What one request carries; a small one stands for those that one thread carries after it, too."""

    upload: Upload
    step: Step
    number: int = 1
    """Of the part, from 1 on."""
    is_leaving: bool = False
    """Its bytes are on their way out; with what only waits for its answer the link has nothing to do."""
    on_left: Callable[[], object] = lambda: None
    """Told, from a thread, when the last byte has left."""

    @property
    def is_small(self) -> bool:
        """Whether the round trip is what it costs."""
        return self.step is Step.WHOLE and self.upload.file.size_bytes <= SMALL_BYTES


class Sending:
    """Hands out pieces and carries them. Once one failed, no others are handed out."""

    def __init__(
        self,
        *,
        name: str,
        bodies: Bodies,
        store: Store,
        capabilities: Capabilities,
        transfers: Transfers,
        journal: Journal,
        part_bytes: int,
        unchanged: Unchanged,
        fence: Callable[[], Awaitable[None]],
        on_progress: Callable[[int], None] = lambda _: None,
        on_change: Callable[[], None] = lambda: None,
        on_sent_in_vain: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.journal = journal
        self.standing = Standing(on_change)
        self.in_flight = 0
        self.large_in_flight = 0
        self.large_leaving = 0
        """Of these, those whose bytes have not all left."""
        self.rest_until_s = 0.0
        """Monotonic: pieces that failed while something else went first are not tried again before."""
        self._bodies = bodies
        self._store = store
        self._can = capabilities
        self._transfers = transfers
        self._part_bytes = part_bytes
        self._unchanged = unchanged
        self._fence = fence
        self._on_progress = on_progress
        self._on_change = on_change
        self._on_sent_in_vain = on_sent_in_vain
        self._files: dict[str, FoundFile] = {}
        self._growing: dict[str, Upload] = {}
        self._missing: set[str] = set()
        """Paths of files that are not in the store, or not confirmed."""
        self._moved: Mapping[str, str] = {}
        self._large: deque[Piece] = deque()
        self._small: deque[Piece] = deque()
        self._sent_bytes = self.sent_bytes()
        self._error: BaseException | None = None
        self._closed = False
        self._changed = asyncio.Event()

    def add(self, files: Iterable[FoundFile], *, moved: Mapping[str, str] | None = None) -> None:
        """Queue what is missing of these files.

        Args:
            files: Each path once.
            moved: Paths that must not lie under the name they have on disk, and their keys (I6).
        """
        self._moved = moved or {}
        for file in files:
            self._files[file.path] = file
            self._queue(file, compare=True)

    def add_growing(self, file: FoundFile) -> None:
        """Queue the whole parts in the beginning of a file that is still being written. ``add`` comes when it is closed.

        Args:
            file: What it was a while ago: so much of it is not expected to change.
        """
        path = file.path
        if path not in self._growing:
            if path in self.journal.stamps and self.journal.stamps[path] != file.growing_stamp:
                self.journal.dropped(path)
            self._growing[path] = self._upload(file, keys.shared_file(self.name, path))
        upload = self._growing[path]
        whole_parts = min(file.size_bytes // upload.part_bytes, self._can.max_parts)
        upload.file, upload.is_growing = file, True
        upload.ranges = part_ranges(whole_parts * upload.part_bytes, part_bytes=upload.part_bytes) if whole_parts else []
        self._files[path] = file
        self._missing.add(path)
        self._queue_parts(upload)

    def entries(self) -> list[FileEntry] | None:
        """Return the entries of all files, or ``None`` while some are not in the store or not confirmed."""
        return None if self._missing else [self.journal.entries[path] for path in self._files]

    def sent_bytes(self) -> int:
        """Return how much of the checkpoint is in the store."""
        whole = sum(entry.size_bytes for entry in self.journal.entries.values())
        return whole + sum(progress.sent_bytes for progress in self.journal.uploads.values())

    @property
    def has_more(self) -> bool:
        """Whether pieces are left to hand out."""
        return self._error is None and not self._closed and bool(self._large or self._small)

    @property
    def is_ending(self) -> bool:
        """Whether all that is left is under way."""
        return self._error is None and not self._closed and not self._large and not self._small

    def take(self, *, large: bool) -> Piece | None:
        """Return the next piece, one with many bytes if those may be sent now."""
        if not self.has_more or time.monotonic() < self.rest_until_s:
            return None
        chosen = self._large if self._large and large else self._small
        if not chosen:
            return None
        piece = chosen.popleft()
        if not self._large and not self._small:
            self._on_change()  # others may begin
        return piece

    def put_back(self, piece: Piece, *, rest_s: float) -> None:
        """Take a piece back that could not be carried now."""
        self.rest_until_s = time.monotonic() + rest_s
        (self._small if piece.is_small else self._large).appendleft(piece)

    async def finished(self) -> list[FileEntry]:
        """Wait until all files are in the store, or what was begun has ended after ``close``; return the entries.

        Raises:
            CheckpointChanged, CheckpointRejected, StoreError: Why a piece could not be carried. No thread is left behind.
        """
        while self.in_flight or not (self._error or self._closed or not self._missing):
            await self._changed.wait()
        if self._error is not None:
            raise self._error
        return self.entries() or []

    def close(self) -> None:
        """Hand out no further pieces."""
        self._closed = True
        self.wake()

    def fail(self, error: BaseException) -> None:
        """A piece could not be carried: the first reason counts."""
        self._error = self._error or error
        self.wake()

    def wake(self) -> None:
        """Something changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def carry(self, piece: Piece) -> None:
        """Do what a piece is for."""
        match piece.step:
            case Step.CONFIRM:
                await self._confirm(piece.upload)
            case Step.COMPARE:
                await self._compare(piece.upload)
            case Step.WHOLE if piece.is_small:
                await self._send_small(piece)
            case Step.WHOLE:
                await self._send_whole(piece.upload, piece.on_left)
            case Step.PART:
                await self._send_part(piece.upload, piece.number, piece.on_left)
            case Step.JOIN:
                await self._join(piece.upload, self.journal.uploads[piece.upload.file.path])

    def _queue(self, file: FoundFile, *, compare: bool) -> None:
        path, journal = file.path, self.journal
        key = self._moved.get(path) or keys.shared_file(self.name, path)
        grown = self._growing.pop(path, None)
        if grown is not None and grown.ranges and file.size_bytes <= grown.part_bytes * self._can.max_parts:
            self._queue_rest(grown, file)
            return
        known = journal.entries.get(path) or journal.uploads.get(path)
        if known is not None and (journal.stamps.get(path) != file.stamp or known.key != key):
            journal.dropped(path)
        upload = self._upload(file, key)
        if path in journal.unconfirmed or path not in journal.entries:
            self._missing.add(path)
        else:
            self._missing.discard(path)
        if path in journal.unconfirmed:
            self._large.append(Piece(upload, Step.CONFIRM))
        elif path not in journal.entries:
            if compare and upload.known is not None and path not in journal.uploads:
                self._large.append(Piece(upload, Step.COMPARE))
            else:
                self._queue_pieces(upload)

    def _queue_pieces(self, upload: Upload) -> None:
        if len(upload.ranges) == 1:
            piece = Piece(upload, Step.WHOLE)
            (self._small if piece.is_small else self._large).append(piece)
            return
        self._queue_parts(upload)
        if not upload.under_way:  # a crash between the last part and the completion
            self._large.append(Piece(upload, Step.JOIN))

    def _queue_parts(self, upload: Upload) -> None:
        progress = self.journal.uploads.get(upload.file.path)
        done = progress.parts if progress else {}
        left = [n for n in range(1, len(upload.ranges) + 1) if n not in done and n not in upload.under_way]
        self._large.extend(Piece(upload, Step.PART, number) for number in left)
        upload.under_way.update(left)

    def _queue_rest(self, upload: Upload, file: FoundFile) -> None:
        """The file is closed: its beginning was sent, or is on its way."""
        upload.file, upload.is_growing = file, False
        upload.ranges = part_ranges(file.size_bytes, part_bytes=upload.part_bytes)
        if file.path in self.journal.uploads:
            self.journal.grown(file)
        self._queue_pieces(upload)

    def _upload(self, file: FoundFile, key: str) -> Upload:
        progress = self.journal.uploads.get(file.path)
        part_bytes = (
            progress.part_bytes
            if progress
            else part_size(
                file.size_bytes,
                wanted_bytes=self._part_bytes,
                min_part_bytes=self._can.min_part_bytes,
                max_parts=self._can.max_parts,
            )
        )
        known = self._unchanged.candidate(file)
        ranges = part_ranges(file.size_bytes, part_bytes=part_bytes)
        return Upload(file, key, part_bytes, ranges, known if known and known.entry.key != key else None)

    async def _confirm(self, upload: Upload) -> None:
        path, ranges = upload.file.path, upload.ranges
        entry, progress = self.journal.entries.get(path), self.journal.uploads.get(path)
        if entry is not None:
            places, wanted = [(0, entry.size_bytes)], [checksum.from_text(entry.crc64nvme)]
        else:
            there = progress.checksums if progress else {}
            places, wanted = [ranges[number - 1] for number in there], list(there.values())
        if await self._transfers.once(self._bodies.is_still, path, places, wanted):
            self.journal.confirmed(path)
        else:
            self._on_sent_in_vain()
            await self._drop(upload)
        self._queue(upload.file, compare=False)

    async def _compare(self, upload: Upload) -> None:
        known = upload.known
        assert known is not None
        wanted = [known.first_crc, *([-1] if len(known.ranges) > 1 else [])]
        crcs = await self._transfers.once(self._bodies.checksums, upload.file.path, known.ranges, wanted)
        if not known.is_it(crcs) or not await self._copy(upload, known):
            self._queue(upload.file, compare=False)

    async def _copy(self, upload: Upload, known: Known) -> bool:
        await self._fence()
        crc = checksum.from_text(known.entry.crc64nvme)
        try:
            stored = await self._transfers.once(self._store.copy, known.entry.key, upload.key, etag=known.entry.etag)
            if not await self._verified(upload, stored, crc):
                return False
        except StoreError:  # deleted meanwhile, not allowed, not implemented: it can still be sent
            return False
        self._stored(upload, stored, crc, part_bytes=known.entry.part_bytes, first_crc=known.first_crc)
        return True

    async def _send_whole(self, upload: Upload, on_left: Callable[[], object]) -> None:
        path, size_bytes = upload.file.path, upload.file.size_bytes
        for _ in range(CORRUPT_TRIES):
            await self._fence()
            began_s = time.monotonic()
            stored, crc = await self._persistently(self._bodies.put_file, path, upload.key, size_bytes, on_left)
            if await self._verified(upload, stored, crc):
                self._arrived(size_bytes, began_s=began_s)
                self._stored(upload, stored, crc, part_bytes=0, first_crc=crc)
                return
        raise CorruptObject(upload.key, want=f"crc64nvme {checksum.to_text(crc)}", got="another one, each time it was sent")

    async def _send_small(self, piece: Piece) -> None:
        await self._fence()
        reads_back, began_s = self._can.verification is Verification.READ_BACK, time.monotonic()
        files = SmallFiles(
            piece.upload, self._next_small, bodies=self._bodies, reads_back=reads_back, stored=self._record_small
        )
        try:
            await self._persistently(files.send)
        finally:
            piece.upload = files.current or piece.upload
            if files.done:
                self._arrived(files.sent_bytes, began_s=began_s)
            self._missing.difference_update(upload.file.path for upload in files.done)
            if not self.has_more:
                self._on_change()  # others may begin

    def _next_small(self) -> Upload | None:
        """Return the next small file, unless something else goes first. Called from threads."""
        if self.standing.behind or not self.has_more:
            return None
        with contextlib.suppress(IndexError):
            return self._small.popleft().upload
        return None

    async def _send_part(self, upload: Upload, number: int, on_left: Callable[[], object]) -> None:
        path, place = upload.file.path, upload.ranges[number - 1]
        await self._fence()
        progress = await self._begun(upload)
        began_s = time.monotonic()
        try:
            part, crc = await self._persistently(self._bodies.put_part, path, progress, number, place, on_left)
        except NotFound:
            # The store dropped the unfinished upload (a lifecycle rule, an abort): the file begins anew.
            self.journal.dropped(path)
            raise
        self.journal.part(path, part, crc=crc)
        upload.under_way.discard(number)
        self._arrived(part.size_bytes, began_s=began_s)
        if len(progress.parts) == len(upload.ranges) and not upload.is_growing:
            await self._join(upload, progress)

    async def _begun(self, upload: Upload) -> FileProgress:
        path = upload.file.path
        upload.begin = upload.begin or asyncio.Lock()
        async with upload.begin:
            if path not in self.journal.uploads:
                upload_id = await self._persistently(self._store.begin_upload, upload.key)
                stamp = upload.file.growing_stamp if upload.is_growing else upload.file.stamp
                self.journal.begun(path, stamp, upload_id=upload_id, key=upload.key, part_bytes=upload.part_bytes)
            return self.journal.uploads[path]

    async def _join(self, upload: Upload, progress: FileProgress) -> None:
        numbers = sorted(progress.parts)
        crc = checksum.combined((progress.checksums[n], progress.parts[n].size_bytes) for n in numbers)
        parts = [progress.parts[n] for n in numbers]
        await self._fence()
        try:
            stored = await self._transfers.persistently(
                self._store.complete_upload, upload.key, progress.upload_id, parts, crc64nvme=crc
            )
            if not await self._verified(upload, stored, crc):
                raise CorruptObject(upload.key, want=f"crc64nvme {checksum.to_text(crc)}", got="another one in the store")
        except (CorruptObject, NotFound):
            await self._drop(upload)
            raise
        self._stored(upload, stored, crc, part_bytes=upload.part_bytes, first_crc=progress.checksums[1])

    async def _verified(self, upload: Upload, stored: Stored, crc: int) -> bool:
        if self._can.verification is not Verification.READ_BACK:
            return True
        return await self._transfers.persistently(self._bodies.read_back, upload.key, stored.etag) == crc

    async def _drop(self, upload: Upload) -> None:
        """Forget what was sent of a file, here and in the store."""
        progress = self.journal.uploads.get(upload.file.path)
        self.journal.dropped(upload.file.path)
        if progress is not None:
            await self._transfers.persistently(self._store.abort_upload, progress.key, progress.upload_id)

    async def _persistently(self, call: Callable[..., T], *args: object) -> T:
        # The store may have been away for an hour: another attempt may have committed the step meanwhile.
        return await self._transfers.persistently(call, *args, standing=self.standing, before_again=self._fence)

    def _arrived(self, size_bytes: int, *, began_s: float) -> None:
        self._transfers.count(size_bytes, began_s=began_s)
        self._sent_bytes += size_bytes
        self._on_progress(self._sent_bytes)

    def _stored(self, upload: Upload, stored: Stored, crc: int, *, part_bytes: int, first_crc: int) -> None:
        self._record(upload, stored, crc, part_bytes=part_bytes, first_crc=first_crc)
        self._missing.discard(upload.file.path)

    def _record_small(self, upload: Upload, stored: Stored, crc: int) -> None:
        self._record(upload, stored, crc, part_bytes=0, first_crc=crc)

    def _record(self, upload: Upload, stored: Stored, crc: int, *, part_bytes: int, first_crc: int) -> None:
        """Write down that a file is in the store. Called from threads, too."""
        entry = FileEntry(
            path=upload.file.path,
            key=upload.key,
            size_bytes=upload.file.size_bytes,
            crc64nvme=checksum.to_text(crc),
            etag=stored.etag,
            part_bytes=part_bytes,
        )
        self.journal.stored(entry, stamp=upload.file.stamp, first_crc=first_crc)
