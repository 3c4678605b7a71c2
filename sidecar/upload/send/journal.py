"""Journal: the parts and files of a checkpoint that are in the store, kept across restarts.

It is a cache: append-only JSON lines in the state directory, one file per version of a checkpoint, and one per early upload.
It may be deleted, truncated in the middle of a line, written by another program, or missing because the disk was full. Then
work is repeated and nothing is lost. ``core.format.journal`` validates each line.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import structlog

from sidecar.core.format.found_checkpoint import FoundFile, is_growing
from sidecar.core.format.journal import (
    MAX_LINE_BYTES,
    Begun,
    FileChange,
    FileStored,
    Grown,
    Line,
    PartSent,
    decode_line,
    encode_line,
)
from sidecar.core.format.manifest import FileEntry
from sidecar.store.protocol import Part
from sidecar.volume.descriptors import closed_on_error, opened, write_all
from sidecar.volume.opener import Place
from trainer_hook.contract import ContractError

log = structlog.get_logger()

MAX_BYTES = 32 << 20
MOST_LINES = 100_000
"""Maximum number of lines, one per small file and one per part. After a restart, files and parts beyond it are sent again."""
RESERVED = 0.2
"""Share of both limits for the lines that take earlier ones back, such as that of a multipart upload that has ended."""
MOST_REFUSED = 100
"""Number of invalid lines after which a journal is not used."""


@dataclass(slots=True)
class FileProgress:
    """Multipart upload of one file. ``checksums`` are the CRC64NVME of the finished parts, by number."""

    upload_id: str
    key: str
    part_bytes: int
    parts: dict[int, Part] = field(default_factory=dict)
    checksums: dict[int, int] = field(default_factory=dict)
    sent_bytes: int = 0
    """Sum of the sizes of the finished parts."""

    def add(self, part: Part, crc: int) -> None:
        """Add a finished part, or replace it."""
        before = self.parts.get(part.number)
        self.sent_bytes += part.size_bytes - (before.size_bytes if before else 0)
        self.parts[part.number], self.checksums[part.number] = part, crc


class Journal:
    """Progress of one version of a checkpoint. Written from the event loop and from worker threads.

    Threads add complete files: other code copies ``entries`` or ``stamps`` before it goes through them.

    ``place``: the file. Its name begins with the checkpoint's, followed by ``@``: only objects of that checkpoint are valid.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._lock = threading.Lock()
        self._writable = True
        self._is_deleted = False
        self._fd: int | None = None
        self._is_cut = False
        """Whether the last line has no line end."""
        self._lines = self._bytes = 0
        """Number of lines and of bytes in the file."""
        self._is_void = False
        """Whether the file is not used, and is replaced at the next record."""
        self.entries: dict[str, FileEntry] = {}
        """Complete files in the store, by path."""
        self._whole_bytes = 0
        """Sum of their sizes."""
        self.uploads: dict[str, FileProgress] = {}
        """Multipart uploads of incomplete files, by path."""
        self.void: list[FileProgress] = []
        """Multipart uploads that will not be continued, to be aborted."""
        self.stamps: dict[str, str] = {}
        """Version of each file when it was sent, by path."""
        self.first_crcs: dict[str, int] = {}
        """Checksum of the first part of complete files, by path."""
        self.taken: set[str] = set()
        """Keys of the checkpoint that are known to have an object, other than those of ``entries``."""
        self.unconfirmed: set[str] = set()
        """Files of an early upload that were not yet compared with their finished version; all, if a line was not valid."""
        self._read()

    @property
    def sent_bytes(self) -> int:
        """Number of bytes in the store: of complete files, and of finished parts of others."""
        return self._whole_bytes + sum(progress.sent_bytes for progress in self.uploads.copy().values())

    def _read(self) -> None:
        name, refused, reason = self.place.name.partition("@")[0], 0, ""
        try:
            for raw in _read_lines(self.place):
                self._is_cut = not raw.endswith(b"\n")
                self._lines, self._bytes = self._lines + 1, self._bytes + len(raw)
                if self._lines > MOST_LINES or self._bytes > MAX_BYTES:
                    self._ignore_file(f"it has more than {MOST_LINES} lines or {MAX_BYTES} bytes")
                    return
                try:
                    self._apply(decode_line(raw, name=name))
                except ContractError as error:
                    refused, reason = refused + 1, reason or str(error)
                    if refused > MOST_REFUSED:
                        self._ignore_file(f"{refused} lines are not valid; the first: {reason}")
                        return
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("journal_not_read", journal=self.place.name, error=str(error), hint="its parts are sent again")
        if refused > self._is_cut:  # the last line of a killed process is truncated
            self.unconfirmed.update(self.stamps)  # one of these lines may have said that a file has to be compared
            hint = "written by another program? The parts of these lines are sent again, and the others are compared"
            log.warning("journal_lines_ignored", journal=self.place.name, lines=refused, first=reason, hint=hint)

    def _ignore_file(self, why: str) -> None:
        """Use nothing of the file: lines that are not read may take back those that were."""
        for known in (self.entries, self.uploads, self.stamps, self.first_crcs, self.taken, self.unconfirmed, self.void):
            known.clear()
        self._whole_bytes, self._is_void, self._is_cut = 0, True, False
        log.warning(
            "journal_not_read", journal=self.place.name, error=why, hint="written by another program? Its parts are sent again"
        )

    def _apply(self, line: Line) -> None:
        match line:
            case Begun():
                self.uploads[line.path] = FileProgress(line.upload_id, line.key, line.part_bytes)
                self.stamps[line.path] = line.stamp
            case Grown() if line.path in self.stamps:
                self.stamps[line.path] = line.stamp
            case PartSent() if line.path in self.uploads:
                self.uploads[line.path].add(Part(line.number, line.size_bytes, line.etag, crc64nvme=line.crc), line.crc)
            case FileStored():
                self._remember(line)
            case FileChange(event="dropped"):
                if line.path in self.uploads:
                    self.void.append(self.uploads[line.path])
                self._whole_bytes -= self._size_of(line.path)
                if line.path in self.entries:
                    self.taken.add(self.entries[line.path].key)
                for known in (self.entries, self.uploads, self.stamps, self.first_crcs):
                    known.pop(line.path, None)
                self.unconfirmed.discard(line.path)
            case FileChange(event="unconfirmed"):
                self.unconfirmed.add(line.path)
            case FileChange(event="confirmed"):
                self.unconfirmed.discard(line.path)

    def _remember(self, line: FileStored) -> None:
        path = line.entry.path
        self._whole_bytes += line.entry.size_bytes - self._size_of(path)
        self.entries[path] = line.entry
        self.stamps[path] = line.stamp
        if line.first_crc is not None:
            self.first_crcs[path] = line.first_crc
        self.uploads.pop(path, None)

    def _size_of(self, path: str) -> int:
        return self.entries[path].size_bytes if path in self.entries else 0

    def _append(self, *lines: Line) -> None:
        with self._lock:
            is_dropped = any(isinstance(line, FileChange) and line.event == "dropped" for line in lines)
            takes_back = is_dropped or any(isinstance(line, FileStored) and line.entry.path in self.uploads for line in lines)
            for line in lines:
                self._apply(line)
            if not self._write(*lines, takes_back=takes_back) and is_dropped and not self._is_deleted:
                # The record that an upload was dropped is not on disk: without the journal, no restart continues that upload.
                self._close()
                self._begin_file()

    def _write(self, *lines: Line, takes_back: bool) -> bool:
        content = b"\n" * self._is_cut + b"".join(map(encode_line, lines))
        if not self._writable or not self._has_room(len(lines), len(content), takes_back=takes_back):
            return False
        try:
            if self._fd is None:
                self._fd = self._open()
            write_all(self._fd, content)
            self._is_cut = False
            self._lines, self._bytes = self._lines + len(lines), self._bytes + len(content)
        except OSError as error:
            self._writable = False
            log.warning("journal_not_written", journal=self.place.name, error=os.strerror(error.errno or 0))
        return self._writable

    def _begin_file(self) -> None:
        self.place.discard()
        self._is_void = self._is_cut = False
        self._lines = self._bytes = 0

    def _has_room(self, lines: int, size_bytes: int, *, takes_back: bool) -> bool:
        if self._is_void:
            return True
        share = 1.0 if takes_back else 1.0 - RESERVED
        return self._lines + lines <= MOST_LINES * share and self._bytes + size_bytes <= MAX_BYTES * share

    def _open(self) -> int:
        if self._is_void:
            self._begin_file()
        fd = self.place.open_file(os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with closed_on_error(fd):
            if os.fstat(fd).st_nlink > 1:  # a hard link to another file
                raise OSError(errno.EMLINK, os.strerror(errno.EMLINK), str(self.place))
        return fd

    def begun(self, path: str, stamp: str, *, upload_id: str, key: str, part_bytes: int) -> None:
        """Record the creation of a multipart upload for a file in the version ``stamp``."""
        self._append(_begun(path, stamp, FileProgress(upload_id, key, part_bytes)))

    def part(self, path: str, part: Part, *, crc: int) -> None:
        """Record a part in the store."""
        self._append(_part(path, part, crc))

    def stored(self, entry: FileEntry, *, stamp: str, first_crc: int | None = None) -> None:
        """Record a complete and verified file. ``first_crc``: checksum of its first part; ``None``: unknown."""
        self._append(_stored(entry, stamp, first_crc))

    def dropped(self, path: str) -> None:
        """Record that a file is sent again from the start."""
        self._append(_change("dropped", path))

    def confirmed(self, path: str) -> None:
        """Record that a file equals its early upload."""
        self._append(_change("confirmed", path))

    def take_over(self, early: Journal, files: Iterable[FoundFile]) -> list[FileProgress]:
        """Merge the journal of the early upload; each file has to be confirmed.

        Returns:
            Multipart uploads that will not be continued, to be aborted.
        """
        ours = {file.path: file for file in files if file.path not in self.stamps}
        self.taken |= early.taken | {entry.key for entry in early.entries.values()}
        for path in list(early.stamps):
            if path not in ours or not early.is_of(ours[path]):
                continue
            stamp = ours[path].stamp
            lines: list[Line] = [_change("unconfirmed", path)]
            if path in early.entries:
                lines.append(_stored(early.entries[path], stamp, early.first_crcs.get(path)))
            if path in early.uploads:
                progress = early.uploads[path]
                lines.append(_begun(path, stamp, progress))
                lines += [_part(path, part, progress.checksums[number]) for number, part in progress.parts.items()]
            self._append(*lines)
        stale = [progress for path, progress in early.uploads.items() if path not in self.uploads]
        return [*stale, *early.void]

    def is_of(self, file: FoundFile) -> bool:
        """Whether the record of a file's path belongs to this version of it, or to its growing state before."""
        return self.stamps.get(file.path) == file.stamp or self.has_beginning_of(file)

    def has_beginning_of(self, file: FoundFile) -> bool:
        """Whether the parts sent belong to the growing state of this file, and the file is not shorter than they are."""
        progress = self.uploads.get(file.path)
        if progress is None or self.stamps[file.path] != file.growing_stamp:
            return False
        return progress.sent_bytes <= file.size_bytes

    def growing(self) -> set[str]:
        """Return the paths of files that were sent while they were being written."""
        return {path for path in self.uploads.copy() if is_growing(self.stamps[path])}

    def grown(self, file: FoundFile) -> None:
        """Record that a file that was sent while it was being written is complete."""
        self._append(Grown.model_construct(path=file.path, stamp=file.stamp))

    def close(self) -> None:
        """Close the file; the next record opens it again."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def delete(self) -> None:
        """Delete the journal; later records are ignored."""
        self._writable, self._is_deleted = False, True
        self.close()
        self.place.discard()


def _read_lines(place: Place) -> Iterator[bytes]:
    """Yield the lines of a file; one that is longer than any valid line is yielded in pieces."""
    with opened(place.open_file()) as fd, os.fdopen(fd, "rb", closefd=False) as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            yield line


# Lines are not validated when they are written: they are validated when they are read.


def _begun(path: str, stamp: str, progress: FileProgress) -> Begun:
    return Begun.model_construct(
        path=path, stamp=stamp, upload_id=progress.upload_id, key=progress.key, part_bytes=progress.part_bytes
    )


def _part(path: str, part: Part, crc: int) -> PartSent:
    return PartSent.model_construct(path=path, number=part.number, size_bytes=part.size_bytes, etag=part.etag, crc=crc)


def _stored(entry: FileEntry, stamp: str, first_crc: int | None) -> FileStored:
    return FileStored.model_construct(stamp=stamp, first_crc=first_crc, entry=entry)


def _change(event: Literal["dropped", "unconfirmed", "confirmed"], path: str) -> FileChange:
    return FileChange.model_construct(event=event, path=path)
