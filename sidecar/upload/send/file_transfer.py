"""Transfer of one checkpoint: hands out its work items, carries them out, and ends when all files are in the store."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from sidecar.core.format import checksum
from sidecar.core.format.found_checkpoint import FoundFile
from sidecar.core.format.manifest import FileEntry
from sidecar.errors import CorruptObject, NotFound, PartRefused, StoreError
from sidecar.store.protocol import Stored, Verification
from sidecar.transfer.executor import CORRUPT_TRIES
from sidecar.transfer.rate_gate import RetryGate
from sidecar.upload.send.deduplicate import Known
from sidecar.upload.send.first_writes import FirstWrites, WriteGuard
from sidecar.upload.send.hedged_request import HedgedRequest, SendTry
from sidecar.upload.send.journal import FileProgress, Journal
from sidecar.upload.send.observer import TransferObserver
from sidecar.upload.send.payloads import Payloads
from sidecar.upload.send.small_batch import SmallBatch
from sidecar.upload.send.store_link import StoreLink
from sidecar.upload.send.work_item import LOCAL_AT_ONCE, Step, Upload, WorkItem
from sidecar.upload.send.work_plan import PartsOf, WorkPlan

T = TypeVar("T")


class FileTransfer:
    """Hands out work items and carries them out. After a failure no further ones are handed out."""

    def __init__(
        self,
        name: str,
        link: StoreLink,
        *,
        payloads: Payloads,
        journal: Journal,
        guard: WriteGuard,
        observer: TransferObserver | None = None,
    ) -> None:
        self.name = name
        self.journal = journal
        self._observer = observer or TransferObserver()
        self.retry_gate = RetryGate(self._observer.changed)
        self.in_flight = 0
        """Number of work items in flight."""
        self.slots = 0
        """Number of their requests."""
        self.large_in_flight: set[WorkItem] = set()
        self.large_sending = 0
        """Number of large work items with bytes left to send."""
        self.local_in_flight = 0
        self.rest_until_s = 0.0
        """End of the backoff, monotonic seconds: set by work items that failed while another upload had priority."""
        self._payloads = payloads
        self._store = link.store
        self._can = link.capabilities
        self._executor = link.executor
        self._guard = guard
        self._first_writes = FirstWrites(name, link, journal, guard)
        self._plan = WorkPlan(name, link, journal)
        self._executing: set[WorkItem] = set()
        self._error: BaseException | None = None
        self._closed = False
        self._changed = asyncio.Event()

    def add(
        self, files: Iterable[FoundFile], *, moved: Mapping[str, str] | None = None, awaited: PartsOf | None = None
    ) -> None:
        """Send the missing parts of these files; arguments as of ``WorkPlan.add``."""
        self._plan.add(files, moved=moved, awaited=awaited)

    def add_growing(self, file: FoundFile) -> None:
        """Send the complete parts of a file that is still being written, as ``WorkPlan.add_growing``."""
        self._plan.add_growing(file)

    def settle(self, other: Journal) -> None:
        """Take the outcome of the awaited parts from the journal ``other``, as ``WorkPlan.settle``."""
        self._plan.settle(other)
        self._observer.changed()

    def entries(self) -> list[FileEntry] | None:
        """Return the entries of all files; ``None`` while some are not in the store or not confirmed."""
        return None if self._plan.missing else [self.journal.entries[path] for path in self._plan.files]

    def sent_bytes(self) -> int:
        """Return the number of bytes of the checkpoint in the store."""
        return self.journal.sent_bytes

    @property
    def has_more(self) -> bool:
        """Whether work items are left to hand out."""
        return self._error is None and not self._closed and bool(self._plan.items)

    @property
    def is_ending(self) -> bool:
        """Whether every work item left is in flight."""
        return self._error is None and not self._closed and not self._plan.items

    def take(self, *, large: bool, small: bool) -> WorkItem | None:
        """Return the next work item; ``None``: there is none now. ``large``, ``small``: whether such items may start."""
        if not self.has_more or time.monotonic() < self.rest_until_s:
            return None
        item = self._plan.items.take(local=self.local_in_flight < LOCAL_AT_ONCE, large=large, small=small)
        if item is not None and not self._plan.items:
            self._observer.changed()  # others may begin
        return item

    def put_back(self, item: WorkItem, *, rest_s: float) -> None:
        """Take back a work item that failed, and back off for ``rest_s`` seconds."""
        self.rest_until_s = time.monotonic() + rest_s
        self._plan.items.put_back(item)

    async def finished(self) -> list[FileEntry]:
        """Wait until all files are in the store or, after ``close``, nothing is in flight; return the entries.

        Raises:
            CheckpointChanged, CheckpointRejected, StoreError: Raised by a work item. No thread is running then.
        """
        while self.in_flight or not (self._error or self._closed or not self._plan.missing):
            await self._changed.wait()
        if self._error is not None:
            raise self._error
        return self.entries() or []

    async def wait_for_parts(self) -> dict[str, set[int]]:
        """Wait until only parts of known multipart uploads are in flight; return their numbers by path."""
        while (parts := self._parts_under_way()) is None:
            await self._changed.wait()
        return parts

    def close(self) -> None:
        """Hand out no further work items, and complete no multipart uploads."""
        self._closed = True
        self.wake()

    def fail(self, error: BaseException) -> None:
        """Record the failure of a work item. The first one is raised by ``finished``."""
        self._error = self._error or error
        self.wake()

    def wake(self) -> None:
        """Wake the waiters of ``finished`` and ``wait_for_parts``."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def execute(self, item: WorkItem) -> None:
        """Carry out a work item."""
        self._executing.add(item)
        try:
            await self._execute(item)
        finally:
            self._executing.discard(item)

    async def _execute(self, item: WorkItem) -> None:
        match item.step:
            case Step.CONFIRM:
                await self._confirm(item.upload)
            case Step.RECHECK:
                await self._recheck(item.upload.file.path, item.number)
            case Step.COMPARE:
                await self._compare(item.upload)
            case Step.WHOLE if item.is_small:
                await self._send_small(item)
            case Step.WHOLE:
                await self._send_whole(item.upload, item.on_sent)
            case Step.PART:
                await self._send_part(item)
            case Step.JOIN:
                await self._join(item.upload, self.journal.uploads[item.upload.file.path])

    def _parts_under_way(self) -> dict[str, set[int]] | None:
        parts: dict[str, set[int]] = {}
        for item in self._executing:
            path = item.upload.file.path
            progress = self.journal.uploads.get(path)
            if item.step is not Step.PART or progress is None or item.number in progress.parts:
                return None
            parts.setdefault(path, set()).add(item.number)
        return parts

    async def _confirm(self, upload: Upload) -> None:
        path, ranges = upload.file.path, upload.ranges
        entry, progress = self.journal.entries.get(path), self.journal.uploads.get(path)
        if entry is not None:
            extents, wanted = [(0, entry.size_bytes)], [checksum.from_text(entry.crc64nvme)]
        else:
            there = progress.checksums if progress else {}
            extents, wanted = [ranges[number - 1] for number in there], list(there.values())
        if await self._executor.in_thread(self._payloads.is_still, path, extents, wanted):
            self.journal.confirmed(path)
        else:
            self._observer.sent_wrong_bytes()
            await self._drop(upload)
        self._plan.queue(upload.file, compare=False)

    async def _recheck(self, path: str, number: int) -> None:
        if (late := self._plan.take_late(path, number)) is None:
            return
        upload, part, crc = late
        if not await self._executor.in_thread(self._payloads.is_still, path, [upload.ranges[number - 1]], [crc]):
            self._observer.sent_wrong_bytes()
            self._plan.send_again(path, number)
        elif self._plan.arrived_late(path, part, crc):
            self._progressed(0)  # counted as arrived by the early upload
            if path not in self.journal.unconfirmed:
                await self._join_if_all_are_there(upload, self.journal.uploads[path])

    async def _compare(self, upload: Upload) -> None:
        known = upload.known
        assert known is not None
        wanted = [known.first_crc, *([-1] if len(known.ranges) > 1 else [])]
        crcs = await self._executor.in_thread(self._payloads.checksums, upload.file.path, known.ranges, wanted)
        if not known.has_checksums(crcs) or not await self._copy(upload, known):
            self._plan.queue(upload.file, compare=False)

    async def _copy(self, upload: Upload, known: Known) -> bool:
        await self._guard.pass_through()
        crc = checksum.from_text(known.entry.crc64nvme)
        try:
            stored = await self._executor.once(self._store.copy, known.entry.key, upload.key, etag=known.entry.etag)
            if not await self._verified(upload, stored, crc):
                return False
        except StoreError:  # deleted meanwhile, forbidden or not implemented: the file is sent instead
            return False
        self._stored(upload, stored, crc, part_bytes=known.entry.part_bytes, first_crc=known.first_crc)
        return True

    async def _send_whole(self, upload: Upload, on_sent: Callable[[], object] | None) -> None:
        path, size_bytes = upload.file.path, upload.file.size_bytes

        def put_file(send_try: SendTry) -> tuple[Stored, int]:
            is_first = self._first_writes.begin(upload.key)
            return self._payloads.put_file(path, upload.key, size_bytes, send_try, only_if_absent=is_first)

        async def put() -> tuple[Stored, int]:
            return await self._persistently(put_file, SendTry(self._payloads.gate, on_sent))

        for _ in range(CORRUPT_TRIES):
            await self._guard.pass_through()
            began_s = time.monotonic()
            stored, crc = await self._first_writes.sent(upload.key, put)
            if await self._verified(upload, stored, crc):
                self._stored(upload, stored, crc, part_bytes=0, first_crc=crc)
                self._arrived(size_bytes, began_s=began_s)
                return
            self.journal.taken.add(upload.key)
        raise CorruptObject(upload.key, want=f"crc64nvme {checksum.to_text(crc)}", got="another one after each try")

    async def _send_small(self, item: WorkItem) -> None:
        await self._guard.pass_through()
        reads_back, began_s = self._can.verification is Verification.READ_BACK, time.monotonic()
        files = SmallBatch(
            item.upload,
            self._next_small,
            at_once=item.at_once,
            payloads=self._payloads,
            reads_back=reads_back,
            begin=self._first_writes.begin,
            stored=self._record_small,
        )
        is_over = False
        try:
            await self._persistently(files.send)
            if files.refused:
                await self._first_writes.refused(*(upload.key for upload in files.refused))
            is_over = True
        finally:
            left = [*files.left, *files.refused]
            if left and not is_over:
                item.upload = left.pop(0)  # the item may be put back
            self._plan.items.add(WorkItem(upload, Step.WHOLE) for upload in left)
            if files.done:
                self._arrived(files.sent_bytes, began_s=began_s)
            self._plan.missing.difference_update(upload.file.path for upload in files.done)
            if not self.has_more:
                self._observer.changed()  # others may begin

    def _next_small(self) -> Upload | None:
        """Return the next small file; ``None`` if there is none, or another upload has priority. Called from threads."""
        if self.retry_gate.behind or not self.has_more:
            return None
        item = self._plan.items.take_small()
        return item.upload if item else None

    async def _send_part(self, item: WorkItem) -> None:
        upload, number = item.upload, item.number
        path, extent = upload.file.path, upload.ranges[number - 1]
        await self._guard.pass_through()
        progress = await self._begun(upload)
        began_s = time.monotonic()
        item.hedged = HedgedRequest(self._payloads.gate, item.on_sent)
        try:
            part, crc = await item.hedged.run(
                functools.partial(self._persistently, self._payloads.put_part, path, progress, number, extent)
            )
        except NotFound:
            # The store dropped the multipart upload (a lifecycle rule, an abort): the file is sent again.
            self.journal.dropped(path)
            raise
        except PartRefused:
            self._observer.part_refused(number)
            await self._drop(upload)
            raise
        self.journal.part(path, part, crc=crc)
        upload.under_way.discard(number)
        self._arrived(part.size_bytes, began_s=began_s)
        await self._join_if_all_are_there(upload, progress)

    async def _join_if_all_are_there(self, upload: Upload, progress: FileProgress) -> None:
        if len(progress.parts) == len(upload.ranges) and not upload.is_growing and not self._closed:
            await self._join(upload, progress)

    async def _begun(self, upload: Upload) -> FileProgress:
        path = upload.file.path
        upload.begin = upload.begin or asyncio.Lock()
        async with upload.begin:
            if upload.is_continued:
                upload.is_continued = False
                await self._compare_beginning(upload)
            if path not in self.journal.uploads:
                upload_id = await self._persistently(self._store.begin_upload, upload.key)
                stamp = upload.file.growing_stamp if upload.is_growing else upload.file.stamp
                self.journal.begun(path, stamp, upload_id=upload_id, key=upload.key, part_bytes=upload.part_bytes)
            return self.journal.uploads[path]

    async def _compare_beginning(self, upload: Upload) -> None:
        """Compare one part of a growing file with its first upload. Once it is finished, all parts are compared."""
        path, progress = upload.file.path, self.journal.uploads[upload.file.path]
        number = min(progress.checksums, default=0)
        if number and not await self._executor.in_thread(
            self._payloads.is_still, path, [upload.ranges[number - 1]], [progress.checksums[number]]
        ):
            self._plan.restart(upload)

    async def _join(self, upload: Upload, progress: FileProgress) -> None:
        numbers = sorted(progress.parts)
        crc = checksum.combined((progress.checksums[n], progress.parts[n].size_bytes) for n in numbers)
        parts = [progress.parts[n] for n in numbers]
        await self._guard.pass_through()
        try:
            stored = await self._executor.persistently(
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
        return await self._executor.persistently(self._payloads.read_back, upload.key, stored.etag) == crc

    async def _drop(self, upload: Upload) -> None:
        """Forget the parts of a file, and abort its multipart upload."""
        path = upload.file.path
        progress = self.journal.uploads.get(path)
        self._plan.dropped(path)
        self._progressed(0)
        if progress is not None:
            await self._executor.persistently(self._store.abort_upload, progress.key, progress.upload_id)

    async def _persistently(self, call: Callable[..., T], *args: object) -> T:
        # After an outage of the store, another attempt may have committed the step: the guard is passed before each retry.
        return await self._executor.persistently(call, *args, retry_gate=self.retry_gate, before_again=self._guard.pass_through)

    def _arrived(self, size_bytes: int, *, began_s: float) -> None:
        self._executor.count(size_bytes, began_s=began_s)
        self._progressed(size_bytes)

    def _progressed(self, arrived_bytes: int) -> None:
        self._observer.progressed(arrived_bytes, self.sent_bytes())

    def _stored(self, upload: Upload, stored: Stored, crc: int, *, part_bytes: int, first_crc: int) -> None:
        self._record(upload, stored, crc, part_bytes=part_bytes, first_crc=first_crc)
        self._plan.missing.discard(upload.file.path)

    def _record_small(self, upload: Upload, stored: Stored, crc: int) -> None:
        self._record(upload, stored, crc, part_bytes=0, first_crc=crc)

    def _record(self, upload: Upload, stored: Stored, crc: int, *, part_bytes: int, first_crc: int) -> None:
        """Record in the journal that a file is in the store. Also called from threads."""
        entry = FileEntry(
            path=upload.file.path,
            key=upload.key,
            size_bytes=upload.file.size_bytes,
            crc64nvme=checksum.to_text(crc),
            etag=stored.etag,
            part_bytes=part_bytes,
        )
        self.journal.stored(entry, stamp=upload.file.stamp, first_crc=first_crc)
