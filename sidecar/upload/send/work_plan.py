"""Work plan of a transfer: the files and parts that are not in the store according to the journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sidecar.core.format import keys
from sidecar.core.format.found_checkpoint import FoundFile
from sidecar.core.schedule.parts import largest_file_bytes, most_bytes, part_size, upload_ranges
from sidecar.store.protocol import Part
from sidecar.upload.send.journal import Journal
from sidecar.upload.send.payloads import Range
from sidecar.upload.send.store_link import StoreLink
from sidecar.upload.send.work_item import Step, Upload, WorkItem, WorkItems

PartsOf = Mapping[str, Iterable[int]]
"""Numbers of parts by the path of their file."""


class WorkPlan:
    """Divides files into work items. Used from the event loop only."""

    def __init__(self, name: str, link: StoreLink, journal: Journal) -> None:
        """Start without files. ``link`` determines the size and the maximum number of parts."""
        self.items = WorkItems()
        self.files: dict[str, FoundFile] = {}
        self.missing: set[str] = set()
        """Paths of files that are not in the store, or not confirmed."""
        self._name = name
        self._journal = journal
        self._part_bytes = link.executor.part_bytes
        self._can = link.capabilities
        self._deduplicator = link.deduplicator
        self._moved: Mapping[str, str] = {}
        self._uploads: dict[str, Upload] = {}
        """Latest upload of each path."""
        self._growing: dict[str, Upload] = {}
        self._awaited: dict[str, set[int]] = {}
        """Numbers of the parts that the early upload of the same files still has in flight, by path."""
        self._late: dict[tuple[str, int], tuple[Part, int]] = {}
        """Awaited parts that arrived and are not compared yet, with their checksums."""

    def add(
        self, files: Iterable[FoundFile], *, moved: Mapping[str, str] | None = None, awaited: PartsOf | None = None
    ) -> None:
        """Queue the missing files and parts.

        Args:
            files: Each path once.
            moved: Keys of the files that must not use the key of their path, by path (I6).
            awaited: Parts that the early upload of these files still has in flight; ``settle`` reports their outcome.
        """
        self._moved = moved or {}
        self._awaited = {path: set(numbers) for path, numbers in (awaited or {}).items()}
        for file in files:
            self.files[file.path] = file
            self.queue(file, compare=True)

    def add_growing(self, file: FoundFile) -> None:
        """Queue the complete parts of a file that is still being written. ``add`` follows when it is closed.

        ``file``: an earlier state of the file: bytes up to that size are not expected to change.
        """
        path = file.path
        if path not in self._growing:
            self._drop_mismatched(file)
            if path in self._journal.stamps and not self._journal.has_beginning_of(file):
                self._journal.dropped(path)
            self._growing[path] = self._upload(file, keys.shared_file(self._name, path), is_growing=True)
            self._growing[path].is_continued = path in self._journal.uploads
        upload = self._growing[path]
        upload.file, upload.is_growing = file, True
        upload.ranges = self._ranges(file.size_bytes, upload.part_bytes, whole_only=True)
        self.files[path] = file
        self.missing.add(path)
        self._queue_parts(upload)

    def settle(self, other: Journal) -> None:
        """Take the outcome of the awaited parts from the journal ``other``: compare those that arrived, send the others."""
        for path, numbers in self._awaited.items():
            ours, theirs = self._journal.uploads.get(path), other.uploads.get(path)
            is_one = ours is not None and theirs is not None and ours.upload_id == theirs.upload_id
            for number in sorted(numbers):
                if is_one and theirs is not None and number in theirs.parts:
                    self._late[path, number] = theirs.parts[number], theirs.checksums[number]
                    self.items.add([WorkItem(self._uploads[path], Step.RECHECK, number)])
                else:
                    self.send_again(path, number)

    def queue(self, file: FoundFile, *, compare: bool) -> None:
        """Queue the missing parts of a file. ``compare``: it may be equal to a file of the newest committed checkpoint."""
        path, journal = file.path, self._journal
        key = self._moved.get(path) or keys.shared_file(self._name, path)
        grown = self._growing.pop(path, None)
        if file.size_bytes > largest_file_bytes(self._can.max_parts):
            self.missing.add(path)  # permanently: its checkpoint is rejected
            return
        if grown is not None and grown.ranges:
            if self._has_room(grown.part_bytes, file):
                self._queue_rest(grown, file)
            else:  # parts of it are in flight: the checkpoint's own upload starts it again, with larger parts
                self.missing.add(path)
            return
        self._drop_mismatched(file)
        if journal.has_beginning_of(file):
            journal.grown(file)
        known = journal.entries.get(path) or journal.uploads.get(path)
        if known is not None and (journal.stamps.get(path) != file.stamp or known.key != key):
            journal.dropped(path)
        if path not in journal.uploads:
            self._awaited.pop(path, None)
        upload = self._uploads[path] = self._upload(file, key)
        if path in journal.unconfirmed or path not in journal.entries:
            self.missing.add(path)
        else:
            self.missing.discard(path)
        if path in journal.unconfirmed:
            self.items.add([WorkItem(upload, Step.CONFIRM)])
        elif path not in journal.entries:
            if compare and upload.known is not None and path not in journal.uploads:
                self.items.add([WorkItem(upload, Step.COMPARE)])
            else:
                self._queue_items(upload)

    def _queue_items(self, upload: Upload) -> None:
        if len(upload.ranges) == 1:
            self.items.add([WorkItem(upload, Step.WHOLE)])
            return
        self._queue_parts(upload)
        if not upload.under_way and not self._awaited.get(upload.file.path):  # a crash between the last part and the completion
            self.items.add([WorkItem(upload, Step.JOIN)])

    def _queue_parts(self, upload: Upload) -> None:
        progress = self._journal.uploads.get(upload.file.path)
        done = progress.parts if progress else {}
        elsewhere = upload.under_way | self._awaited.get(upload.file.path, set())
        left = [n for n in range(1, len(upload.ranges) + 1) if n not in done and n not in elsewhere]
        self.items.add(WorkItem(upload, Step.PART, number) for number in left)
        upload.under_way.update(left)

    def _queue_rest(self, upload: Upload, file: FoundFile) -> None:
        """Queue the rest of a closed file whose first parts were sent or are in flight."""
        upload.file, upload.is_growing = file, False
        upload.ranges = self._ranges(file.size_bytes, upload.part_bytes)
        if file.path in self._journal.uploads:
            self._journal.grown(file)
        self._queue_items(upload)

    def _upload(self, file: FoundFile, key: str, *, is_growing: bool = False) -> Upload:
        progress = self._journal.uploads.get(file.path)
        part_bytes = (
            progress.part_bytes
            if progress
            else part_size(
                file.size_bytes,
                wanted_bytes=self._part_bytes(file.size_bytes),
                min_part_bytes=self._can.min_part_bytes,
                max_parts=self._can.max_parts,
            )
        )
        known = self._deduplicator.candidate(file)
        ranges = self._ranges(file.size_bytes, part_bytes, whole_only=is_growing)
        return Upload(file, key, part_bytes, ranges, known if known and known.entry.key != key else None)

    def _ranges(self, size_bytes: int, part_bytes: int, *, whole_only: bool = False) -> list[Range]:
        return upload_ranges(size_bytes, part_bytes=part_bytes, max_parts=self._can.max_parts, whole_only=whole_only)

    def _has_room(self, part_bytes: int, file: FoundFile) -> bool:
        return file.size_bytes <= most_bytes(part_bytes=part_bytes, max_parts=self._can.max_parts)

    def _drop_mismatched(self, file: FoundFile) -> None:
        """Forget the parts of a file if the maximum number of parts does not suffice, or if the size of a part does not fit."""
        progress = self._journal.uploads.get(file.path)
        if progress is None:
            return
        is_possible = progress.part_bytes >= min(self._can.min_part_bytes, max(1, file.size_bytes))
        has_room = is_possible and self._has_room(progress.part_bytes, file)
        ranges = self._ranges(file.size_bytes, progress.part_bytes) if has_room else []
        is_wrong = any(not 0 < n <= len(ranges) or part.size_bytes != ranges[n - 1][1] for n, part in progress.parts.items())
        if is_wrong or not has_room:
            self._journal.dropped(file.path)

    def send_again(self, path: str, number: int) -> None:
        """Send an awaited part that did not arrive, or differs from the file."""
        self._awaited.get(path, set()).discard(number)
        if path in self._journal.uploads and path not in self._journal.unconfirmed:
            self._queue_parts(self._uploads[path])

    def restart(self, upload: Upload) -> None:
        """Send all of a file: the parts sent before belong to another version."""
        self.dropped(upload.file.path)
        self._queue_parts(upload)

    def take_late(self, path: str, number: int) -> tuple[Upload, Part, int] | None:
        """Return an awaited part that arrived, and its checksum; ``None``: the whole file is sent again."""
        late = self._late.pop((path, number), None)
        return None if late is None else (self._uploads[path], *late)

    def arrived_late(self, path: str, part: Part, crc: int) -> bool:
        """Record an awaited part that equals the file. Returns False if the file is sent again anyway."""
        if path not in self._journal.uploads or part.number not in self._awaited.get(path, ()):
            return False
        self._awaited[path].discard(part.number)
        self._journal.part(path, part, crc=crc)
        return True

    def dropped(self, path: str) -> None:
        """Forget all parts of a file."""
        for number in self._awaited.pop(path, ()):
            self._late.pop((path, number), None)
        self._journal.dropped(path)
