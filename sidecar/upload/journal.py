"""The sidecar's memory across restarts: which parts and files of a checkpoint are in the store already.

A cache: append-only JSON lines below ``.ckpt/journal``, one file per version of a checkpoint, and one for what
is sent before there is a version. It may be deleted, be cut off in the middle of a line or not be written at all because the
disk is full; then work is done again and nothing is lost.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import structlog

from sidecar.core.local import FoundFile, is_growing
from sidecar.core.manifest import FileEntry
from sidecar.store.protocol import Part

log = structlog.get_logger()


@dataclass(slots=True)
class FileProgress:
    """What is known of one file's upload. ``checksums`` are the CRC64NVME of the finished parts, by number."""

    upload_id: str
    key: str
    part_bytes: int
    parts: dict[int, Part] = field(default_factory=dict)
    checksums: dict[int, int] = field(default_factory=dict)

    @property
    def sent_bytes(self) -> int:
        """Sum of the finished parts."""
        return sum(part.size_bytes for part in self.parts.values())


class Journal:
    """Progress of one version of a checkpoint. Written from the event loop and from worker threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._writable = True
        self._file: BinaryIO | None = None
        self.entries: dict[str, FileEntry] = {}
        """Files that are in the store whole, by path."""
        self.uploads: dict[str, FileProgress] = {}
        """Files of which parts are in the store, by path."""
        self.void: list[FileProgress] = []
        """Uploads that nobody continues: to be aborted, if they are there yet."""
        self.stamps: dict[str, str] = {}
        """What each file was when it was sent, by path."""
        self.first_crcs: dict[str, int] = {}
        """Checksum of the first part of files that are in the store whole, by path."""
        self.unconfirmed: set[str] = set()
        """Files that were sent before the trainer had finished the checkpoint, and not compared since."""
        for line in self._lines():
            self._apply(line)

    def _lines(self) -> Iterator[dict[str, Any]]:
        try:
            with self.path.open("rb") as lines:
                for line in lines:
                    with suppress(ValueError):  # cut off by a crash
                        value = json.loads(line)
                        if isinstance(value, dict):
                            yield value
        except OSError:
            return

    def _apply(self, line: dict[str, Any]) -> None:
        try:
            match line["event"]:
                case "begun":
                    self.uploads[line["path"]] = FileProgress(line["upload_id"], line["key"], line["part_bytes"])
                    self.stamps[line["path"]] = line["stamp"]
                case "grown":
                    self.stamps[line["path"]] = line["stamp"]
                case "part":
                    progress = self.uploads[line["path"]]
                    progress.parts[line["number"]] = Part(line["number"], line["size_bytes"], line["etag"])
                    progress.checksums[line["number"]] = line["crc"]
                case "stored":
                    self._remember(FileEntry.model_validate(line["entry"]), line["stamp"], line["first_crc"])
                case "dropped":
                    if line["path"] in self.uploads:
                        self.void.append(self.uploads[line["path"]])
                    for known in (self.entries, self.uploads, self.stamps, self.first_crcs):
                        known.pop(line["path"], None)
                    self.unconfirmed.discard(line["path"])
                case "unconfirmed":
                    self.unconfirmed.add(line["path"])
                case "confirmed":
                    self.unconfirmed.discard(line["path"])
        except (KeyError, TypeError, ValueError):
            return

    def _remember(self, entry: FileEntry, stamp: str, first_crc: int | None) -> None:
        self.entries[entry.path] = entry
        self.stamps[entry.path] = stamp
        if first_crc is not None:
            self.first_crcs[entry.path] = first_crc
        self.uploads.pop(entry.path, None)

    def _append(self, *lines: dict[str, Any]) -> None:
        with self._lock:
            for line in lines:
                self._apply(line)
            self._write(*lines)

    def _write(self, *lines: dict[str, Any]) -> None:
        if not self._writable:
            return
        try:
            if self._file is None:
                self._file = self.path.open("ab", buffering=0)
            self._file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        except OSError as error:
            self._writable = False
            log.warning("journal_not_written", journal=self.path.name, error=os.strerror(error.errno or 0))

    def begun(self, path: str, stamp: str, *, upload_id: str, key: str, part_bytes: int) -> None:
        """A multipart upload was begun for a file, which is what its stamp says."""
        self._append(_begun(path, stamp, FileProgress(upload_id, key, part_bytes)))

    def part(self, path: str, part: Part, *, crc: int) -> None:
        """A part is in the store."""
        self._append(_part(path, part, crc))

    def stored(self, entry: FileEntry, *, stamp: str, first_crc: int | None = None) -> None:
        """A file is in the store whole, and was verified. ``first_crc`` is the checksum of its first part."""
        with self._lock:
            self._remember(entry, stamp, first_crc)
            self._write(_stored(entry, stamp, first_crc))

    def dropped(self, path: str) -> None:
        """What was known of a file is void: it is sent again from the start."""
        self._append({"event": "dropped", "path": path})

    def confirmed(self, path: str) -> None:
        """A file that was sent early is still what was sent."""
        self._append({"event": "confirmed", "path": path})

    def take_over(self, early: Journal, files: Iterable[FoundFile]) -> list[FileProgress]:
        """Continue with what was sent before the checkpoint was finished; each file has to be confirmed.

        Returns:
            Unfinished uploads that nobody continues: to be aborted.
        """
        ours = {file.path: file for file in files if file.path not in self.stamps}
        for path in early.stamps:
            if path not in ours or not early.is_of(ours[path]):
                continue
            stamp = ours[path].stamp
            lines = [{"event": "unconfirmed", "path": path}]
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
        """Whether what is known of a file's path is of this file, or of what it was while it was being written."""
        return self.stamps.get(file.path) == file.stamp or self.has_beginning_of(file)

    def has_beginning_of(self, file: FoundFile) -> bool:
        """Whether a file has become longer, as far as its size tells, since parts of it were sent."""
        progress = self.uploads.get(file.path)
        if progress is None or self.stamps[file.path] != file.growing_stamp:
            return False
        return max(progress.parts, default=0) * progress.part_bytes <= file.size_bytes

    def growing(self) -> set[str]:
        """Return the paths of files of which the beginning was sent while they were being written."""
        return {path for path in self.uploads if is_growing(self.stamps[path])}

    def grown(self, file: FoundFile) -> None:
        """A file of which the beginning was sent while it was being written is complete."""
        self._append({"event": "grown", "path": file.path, "stamp": file.stamp})

    def close(self) -> None:
        """Give the file back; it is opened again when there is more to write."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def delete(self) -> None:
        """Forget everything, also what is still told of it."""
        self._writable = False
        self.close()
        self.path.unlink(missing_ok=True)


def _begun(path: str, stamp: str, progress: FileProgress) -> dict[str, Any]:
    upload = {"upload_id": progress.upload_id, "key": progress.key, "part_bytes": progress.part_bytes}
    return {"event": "begun", "path": path, "stamp": stamp, **upload}


def _part(path: str, part: Part, crc: int) -> dict[str, Any]:
    sent = {"number": part.number, "size_bytes": part.size_bytes, "etag": part.etag, "crc": crc}
    return {"event": "part", "path": path, **sent}


def _stored(entry: FileEntry, stamp: str, first_crc: int | None) -> dict[str, Any]:
    return {"event": "stored", "stamp": stamp, "first_crc": first_crc, "entry": dict(entry)}
