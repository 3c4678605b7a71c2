"""What is left to send of each file of a checkpoint, given what the journal knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from sidecar.core import keys
from sidecar.core.local import FoundFile
from sidecar.core.parts import part_ranges, part_size
from sidecar.store.protocol import Capabilities, Part
from sidecar.upload.journal import Journal
from sidecar.upload.pieces import Piece, Pieces, Step, Upload
from sidecar.upload.unchanged import Unchanged

PartsOf = Mapping[str, Iterable[int]]
"""Numbers of parts by the path of their file."""


class Left:
    """Turns files into pieces. Used from the event loop only."""

    def __init__(
        self,
        *,
        name: str,
        journal: Journal,
        part_bytes: Callable[[int], int],
        capabilities: Capabilities,
        unchanged: Unchanged,
    ) -> None:
        """Begin with nothing. ``part_bytes`` says how large the parts of a file of so many bytes should be."""
        self.pieces = Pieces()
        self.files: dict[str, FoundFile] = {}
        self.missing: set[str] = set()
        """Paths of files that are not in the store, or not confirmed."""
        self._name = name
        self._journal = journal
        self._part_bytes = part_bytes
        self._can = capabilities
        self._unchanged = unchanged
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
            if path in self._journal.stamps and not self._journal.has_beginning_of(file):
                self._journal.dropped(path)
            self._growing[path] = self._upload(file, keys.shared_file(self._name, path))
            self._growing[path].is_continued = path in self._journal.uploads
        upload = self._growing[path]
        whole_parts = min(file.size_bytes // upload.part_bytes, self._can.max_parts)
        upload.file, upload.is_growing = file, True
        upload.ranges = part_ranges(whole_parts * upload.part_bytes, part_bytes=upload.part_bytes) if whole_parts else []
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
                    self.pieces.add([Piece(self._uploads[path], Step.RECHECK, number)])
                else:
                    self.send_after_all(path, number)

    def queue(self, file: FoundFile, *, compare: bool) -> None:
        """Queue what is missing of a file. ``compare``: it may be the one of the newest committed checkpoint."""
        path, journal = file.path, self._journal
        key = self._moved.get(path) or keys.shared_file(self._name, path)
        grown = self._growing.pop(path, None)
        if grown is not None and grown.ranges and file.size_bytes <= grown.part_bytes * self._can.max_parts:
            self._queue_rest(grown, file)
            return
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
            self.pieces.add([Piece(upload, Step.CONFIRM)])
        elif path not in journal.entries:
            if compare and upload.known is not None and path not in journal.uploads:
                self.pieces.add([Piece(upload, Step.COMPARE)])
            else:
                self._queue_pieces(upload)

    def _queue_pieces(self, upload: Upload) -> None:
        if len(upload.ranges) == 1:
            self.pieces.add([Piece(upload, Step.WHOLE)])
            return
        self._queue_parts(upload)
        if not upload.under_way and not self._awaited.get(upload.file.path):  # a crash between the last part and the completion
            self.pieces.add([Piece(upload, Step.JOIN)])

    def _queue_parts(self, upload: Upload) -> None:
        progress = self._journal.uploads.get(upload.file.path)
        done = progress.parts if progress else {}
        elsewhere = upload.under_way | self._awaited.get(upload.file.path, set())
        left = [n for n in range(1, len(upload.ranges) + 1) if n not in done and n not in elsewhere]
        self.pieces.add(Piece(upload, Step.PART, number) for number in left)
        upload.under_way.update(left)

    def _queue_rest(self, upload: Upload, file: FoundFile) -> None:
        """The file is closed: its beginning was sent, or is on its way."""
        upload.file, upload.is_growing = file, False
        upload.ranges = part_ranges(file.size_bytes, part_bytes=upload.part_bytes)
        if file.path in self._journal.uploads:
            self._journal.grown(file)
        self._queue_pieces(upload)

    def _upload(self, file: FoundFile, key: str) -> Upload:
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
        known = self._unchanged.candidate(file)
        ranges = part_ranges(file.size_bytes, part_bytes=part_bytes)
        return Upload(file, key, part_bytes, ranges, known if known and known.entry.key != key else None)

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
