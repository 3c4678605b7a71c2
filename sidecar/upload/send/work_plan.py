"""What is left to send of each file of a checkpoint, given what the journal knows."""

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
    """Turns files into pieces. Used from the event loop only."""

    def __init__(self, name: str, link: StoreLink, journal: Journal) -> None:
        """Begin without files. ``link`` gives the size and the maximum number of parts."""
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
        """What was queued last of each path."""
        self._growing: dict[str, Upload] = {}
        self._awaited: dict[str, set[int]] = {}
        """Parts that another sending of the same files still carries, by path."""
        self._late: dict[tuple[str, int], tuple[Part, int]] = {}
        """Of these, those that arrived, with their checksums, until they are compared."""

    def add(
        self, files: Iterable[FoundFile], *, moved: Mapping[str, str] | None = None, awaited: PartsOf | None = None
    ) -> None:
        """Queue what is missing of these files.

        Args:
            files: Each path once.
            moved: Paths that must not lie under the name they have on disk, and their keys (I6).
            awaited: What another sending of these files still carries: ``settle`` says what became of it.
        """
        self._moved = moved or {}
        self._awaited = {path: set(numbers) for path, numbers in (awaited or {}).items()}
        for file in files:
            self.files[file.path] = file
            self.queue(file, compare=True)

    def add_growing(self, file: FoundFile) -> None:
        """Queue the whole parts in the beginning of a file that is still being written. ``add`` comes when it is closed.

        Args:
            file: What it was a while ago: so much of it is not expected to change.
        """
        path = file.path
        if path not in self._growing:
            self._drop_what_does_not_fit(file)
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
        """What was awaited has ended: what arrived is compared, the rest is sent."""
        for path, numbers in self._awaited.items():
            ours, theirs = self._journal.uploads.get(path), other.uploads.get(path)
            is_one = ours is not None and theirs is not None and ours.upload_id == theirs.upload_id
            for number in sorted(numbers):
                if is_one and theirs is not None and number in theirs.parts:
                    self._late[path, number] = theirs.parts[number], theirs.checksums[number]
                    self.items.add([WorkItem(self._uploads[path], Step.RECHECK, number)])
                else:
                    self.send_after_all(path, number)

    def queue(self, file: FoundFile, *, compare: bool) -> None:
        """Queue what is missing of a file. ``compare``: it may be the one of the newest committed checkpoint."""
        path, journal = file.path, self._journal
        key = self._moved.get(path) or keys.shared_file(self._name, path)
        grown = self._growing.pop(path, None)
        if file.size_bytes > largest_file_bytes(self._can.max_parts):
            self.missing.add(path)  # for ever: its checkpoint is rejected
            return
        if grown is not None and grown.ranges:
            if self._has_room(grown.part_bytes, file):
                self._queue_rest(grown, file)
            else:  # parts of it are under way: the checkpoint's own sending begins it anew, with larger ones
                self.missing.add(path)
            return
        self._drop_what_does_not_fit(file)
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
                self._queue_pieces(upload)

    def _queue_pieces(self, upload: Upload) -> None:
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
        """The file is closed: its beginning was sent, or is on its way."""
        upload.file, upload.is_growing = file, False
        upload.ranges = self._ranges(file.size_bytes, upload.part_bytes)
        if file.path in self._journal.uploads:
            self._journal.grown(file)
        self._queue_pieces(upload)

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

    def _drop_what_does_not_fit(self, file: FoundFile) -> None:
        """Forget what was sent of a file if the rest of it has no room, or if a part is not what its number stands for."""
        progress = self._journal.uploads.get(file.path)
        if progress is None:
            return
        is_possible = progress.part_bytes >= min(self._can.min_part_bytes, max(1, file.size_bytes))
        has_room = is_possible and self._has_room(progress.part_bytes, file)
        ranges = self._ranges(file.size_bytes, progress.part_bytes) if has_room else []
        is_wrong = any(not 0 < n <= len(ranges) or part.size_bytes != ranges[n - 1][1] for n, part in progress.parts.items())
        if is_wrong or not has_room:
            self._journal.dropped(file.path)

    def send_after_all(self, path: str, number: int) -> None:
        """A part that was awaited is not what it should be: it is sent like the others."""
        self._awaited.get(path, set()).discard(number)
        if path in self._journal.uploads and path not in self._journal.unconfirmed:
            self._queue_parts(self._uploads[path])

    def begin_anew(self, upload: Upload) -> None:
        """What was sent of a file is of another one: all of it is sent."""
        self.dropped(upload.file.path)
        self._queue_parts(upload)

    def take_late(self, path: str, number: int) -> tuple[Upload, Part, int] | None:
        """Return a part that has arrived and is to be compared, and its checksum; ``None``: all of the file is sent again."""
        late = self._late.pop((path, number), None)
        return None if late is None else (self._uploads[path], *late)

    def arrived_late(self, path: str, part: Part, crc: int) -> bool:
        """A part that was awaited is what it should be. Returns whether it counts."""
        if path not in self._journal.uploads or part.number not in self._awaited.get(path, ()):
            return False
        self._awaited[path].discard(part.number)
        self._journal.part(path, part, crc=crc)
        return True

    def dropped(self, path: str) -> None:
        """What was known of a file is void."""
        for number in self._awaited.pop(path, ()):
            self._late.pop((path, number), None)
        self._journal.dropped(path)
