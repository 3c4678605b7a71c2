"""Sends the files of one pinned checkpoint: parts of all its files are one stream of work for a few threads."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from sidecar.core import checksum, keys
from sidecar.core.local import FoundFile
from sidecar.core.manifest import FileEntry
from sidecar.core.parts import part_ranges, part_size
from sidecar.errors import CorruptObject, NotFound, Stopped, StoreUnavailable
from sidecar.journal import FileProgress, Journal
from sidecar.store.protocol import Capabilities, Part, Store, Stored, Verification
from sidecar.store.slice import BLOCK_BYTES, FileSlice
from sidecar.transfer import CORRUPT_TRIES, Transfers
from sidecar.volume import Pin


class Overtaken(Stopped):
    """A newer checkpoint goes first; what was sent is kept."""


@dataclass(slots=True)
class _Upload:
    """One file on its way."""

    file: FoundFile
    key: str
    part_bytes: int
    ranges: list[tuple[int, int]]
    progress: FileProgress | None = None
    begin: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def in_parts(self) -> bool:
        return len(self.ranges) > 1

    def left(self) -> list[int]:
        """Numbers of the parts that are not in the store, from 1 on."""
        done = self.progress.parts if self.progress else {}
        return [number for number in range(1, len(self.ranges) + 1) if number not in done]


class Sender:
    """Sends what is missing of a checkpoint. Once ``pause`` is set, the parts in flight finish and no others begin."""

    def __init__(
        self,
        *,
        store: Store,
        capabilities: Capabilities,
        transfers: Transfers,
        pin: Pin,
        journal: Journal,
        part_bytes: int,
        pause: asyncio.Event,
        on_progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._can = capabilities
        self._transfers = transfers
        self._pin = pin
        self._journal = journal
        self._part_bytes = part_bytes
        self._on_progress = on_progress
        self._sent_bytes = 0
        self._pause = pause

    def entries(self) -> list[FileEntry] | None:
        """Return the entries of all files, or ``None`` while some are not in the store."""
        there = self._journal.entries
        files = self._pin.checkpoint.files
        return [there[file.path] for file in files] if all(file.path in there for file in files) else None

    def sent_bytes(self) -> int:
        """Return how much of the checkpoint is in the store."""
        whole = sum(entry.size_bytes for entry in self._journal.entries.values())
        return whole + sum(part.size_bytes for p in self._journal.uploads.values() for part in p.parts.values())

    def _arrived(self, size_bytes: int, *, began_s: float) -> None:
        self._transfers.count(size_bytes, began_s=began_s)
        self._sent_bytes += size_bytes
        self._on_progress(self._sent_bytes)

    async def adopt(self, known: Mapping[str, FileEntry]) -> None:
        """Take over files that an earlier life sent: those whose content on disk has the checksum recorded then."""
        for file in self._pin.checkpoint.files:
            entry = known.get(file.path)
            if entry is None or entry.size_bytes != file.size_bytes or file.path in self._journal.entries:
                continue
            crc = await self._transfers.once(self._checksum, file)
            if checksum.to_text(crc) == entry.crc64nvme:
                self._journal.stored(entry)

    async def send(self, moved: Mapping[str, str]) -> list[FileEntry]:
        """Send all files that are not in the store and return their entries.

        Args:
            moved: Paths that must not lie under the name they have on disk, and their keys (I6).

        Raises:
            Overtaken: ``pause`` was set.
            CheckpointChanged, CheckpointRejected: A file is not what was pinned.
        """
        self._sent_bytes = self.sent_bytes()
        pieces = self._pieces(moved)
        async with asyncio.TaskGroup() as workers:
            for _ in range(self._transfers.concurrency):
                workers.create_task(self._work(pieces))
        entries = self.entries()
        if entries is None:
            raise Overtaken("a newer checkpoint goes first")
        return entries

    async def _work(self, pieces: Iterator[tuple[_Upload, int]]) -> None:
        for upload, number in pieces:
            if self._pause.is_set():
                return
            if upload.in_parts:
                await self._send_part(upload, number)
            else:
                await self._send_whole(upload)

    def _pieces(self, moved: Mapping[str, str]) -> Iterator[tuple[_Upload, int]]:
        for file in self._pin.checkpoint.files:
            if file.path not in self._journal.entries:
                upload = self._upload(file, moved.get(file.path) or keys.shared_file(self._pin.checkpoint.name, file.path))
                # A crash between the last part and the completion leaves nothing to send: the last part goes again.
                for number in upload.left() or [len(upload.ranges)]:
                    yield upload, number

    def _upload(self, file: FoundFile, key: str) -> _Upload:
        progress = self._journal.uploads.get(file.path)
        if progress is not None and progress.key != key:
            self._journal.dropped(file.path)
            progress = None
        size = part_size(
            file.size_bytes,
            wanted_bytes=self._part_bytes,
            min_part_bytes=self._can.min_part_bytes,
            max_parts=self._can.max_parts,
        )
        part_bytes = progress.part_bytes if progress else size
        return _Upload(file, key, part_bytes, part_ranges(file.size_bytes, part_bytes=part_bytes), progress)

    async def _send_whole(self, upload: _Upload) -> None:
        began_s = time.monotonic()
        for attempt in range(1, CORRUPT_TRIES + 1):
            stored, crc = await self._transfers.persistently(self._put_file, upload)
            if await self._verified(upload, stored, crc, last_try=attempt == CORRUPT_TRIES):
                break
        self._arrived(upload.file.size_bytes, began_s=began_s)
        self._stored(upload, stored, crc, part_bytes=0)

    async def _send_part(self, upload: _Upload, number: int) -> None:
        progress = await self._begun(upload)
        began_s = time.monotonic()
        try:
            part, crc = await self._transfers.persistently(self._put_part, upload, progress, number)
            self._journal.part(upload.file.path, part, crc=crc)
            self._arrived(part.size_bytes, began_s=began_s)
            if not upload.left():
                await self._complete(upload, progress)
        except NotFound:
            # The store dropped the unfinished upload (a lifecycle rule, an abort): the file begins anew.
            self._journal.dropped(upload.file.path)
            raise

    async def _begun(self, upload: _Upload) -> FileProgress:
        async with upload.begin:
            if upload.progress is None:
                upload_id = await self._transfers.persistently(self._store.begin_upload, upload.key)
                self._journal.begun(upload.file.path, upload_id=upload_id, key=upload.key, part_bytes=upload.part_bytes)
                upload.progress = self._journal.uploads[upload.file.path]
            return upload.progress

    async def _complete(self, upload: _Upload, progress: FileProgress) -> None:
        numbers = sorted(progress.parts)
        crc = checksum.combined((progress.checksums[n], progress.parts[n].size_bytes) for n in numbers)
        parts = [progress.parts[n] for n in numbers]
        stored = await self._transfers.persistently(
            self._store.complete_upload, upload.key, progress.upload_id, parts, crc64nvme=crc
        )
        if not await self._verified(upload, stored, crc, last_try=True):  # raises when it is not
            return
        self._stored(upload, stored, crc, part_bytes=upload.part_bytes)

    async def _verified(self, upload: _Upload, stored: Stored, crc: int, *, last_try: bool) -> bool:
        if self._can.verification is not Verification.READ_BACK:
            return True
        got = await self._transfers.persistently(self._read_back, upload.key, stored)
        if got == crc:
            return True
        if not last_try:
            return False
        self._journal.dropped(upload.file.path)
        raise CorruptObject(upload.key, want=f"crc64nvme {checksum.to_text(crc)}", got=f"crc64nvme {checksum.to_text(got)}")

    def _stored(self, upload: _Upload, stored: Stored, crc: int, *, part_bytes: int) -> None:
        self._journal.stored(
            FileEntry(
                path=upload.file.path,
                key=upload.key,
                size_bytes=upload.file.size_bytes,
                crc64nvme=checksum.to_text(crc),
                etag=stored.etag,
                part_bytes=part_bytes,
            )
        )

    # What follows runs in worker threads.

    def _slice(self, fd: int, upload: _Upload, number: int) -> FileSlice:
        offset, length = upload.ranges[number - 1]
        name = f"{self._pin.checkpoint.name}/{upload.file.path}"
        with_md5 = self._can.verification is Verification.MD5
        return FileSlice(fd, offset, length, gate=self._transfers.gate, name=name, with_md5=with_md5)

    def _put_file(self, upload: _Upload) -> tuple[Stored, int]:
        with self._pin.open(upload.file.path) as fd:
            body = self._slice(fd, upload, 1)
            stored = self._store.put_file(upload.key, body)
        return stored, body.crc64nvme

    def _put_part(self, upload: _Upload, progress: FileProgress, number: int) -> tuple[Part, int]:
        with self._pin.open(upload.file.path) as fd:
            body = self._slice(fd, upload, number)
            try:
                part = self._store.upload_part(upload.key, progress.upload_id, number, body)
            except StoreUnavailable:
                # Some servers answer 500 for ever to a part of an upload that they no longer know.
                next(iter(self._store.list_parts(upload.key, progress.upload_id)), None)
                raise
        return part, body.crc64nvme

    def _checksum(self, file: FoundFile) -> int:
        crc = 0
        with self._pin.open(file.path) as fd, os.fdopen(fd, "rb", buffering=0, closefd=False) as content:
            while block := content.read(BLOCK_BYTES):
                crc = checksum.checksum(block, crc)
        return crc

    def _read_back(self, key: str, stored: Stored) -> int:
        crc, buffer = 0, memoryview(bytearray(BLOCK_BYTES))
        with self._store.read(key, etag=stored.etag) as body:
            while count := body.readinto(buffer):
                crc = checksum.checksum(bytes(buffer[:count]), crc)
        return crc
