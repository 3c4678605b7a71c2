"""The sidecar's memory across restarts: which parts and files of a checkpoint are in the store already.

A cache: append-only JSON lines below ``.ckpt/journal``, one file per version of a checkpoint. It may be deleted, be cut off
in the middle of a line or not be written at all because the disk is full; then work is done again and nothing is lost.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

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


class Journal:
    """Progress of one version of a checkpoint. Written from the event loop and from worker threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._writable = True
        self.entries: dict[str, FileEntry] = {}
        """Files that are in the store whole, by path."""
        self.uploads: dict[str, FileProgress] = {}
        """Files of which parts are in the store, by path."""
        for line in self._lines():
            self._apply(line)

    def _lines(self) -> Iterator[dict[str, Any]]:
        try:
            raw = self._path.read_bytes()
        except OSError:
            return
        for line in raw.splitlines():
            try:
                value = json.loads(line)
            except ValueError:  # cut off by a crash
                continue
            if isinstance(value, dict):
                yield value

    def _apply(self, line: dict[str, Any]) -> None:
        try:
            match line["event"]:
                case "begun":
                    self.uploads[line["path"]] = FileProgress(line["upload_id"], line["key"], line["part_bytes"])
                case "part":
                    progress = self.uploads[line["path"]]
                    progress.parts[line["number"]] = Part(line["number"], line["size_bytes"], line["etag"])
                    progress.checksums[line["number"]] = line["crc"]
                case "stored":
                    entry = FileEntry.model_validate(line["entry"])
                    self.entries[entry.path] = entry
                    self.uploads.pop(entry.path, None)
                case "dropped":
                    self.entries.pop(line["path"], None)
                    self.uploads.pop(line["path"], None)
        except (KeyError, TypeError, ValueError):
            return

    def _append(self, line: dict[str, Any]) -> None:
        with self._lock:
            self._apply(line)
            if not self._writable:
                return
            try:
                with self._path.open("ab") as file:
                    file.write(json.dumps(line).encode() + b"\n")
            except OSError as error:
                self._writable = False
                log.warning("journal_not_written", journal=self._path.name, error=os.strerror(error.errno or 0))

    def begun(self, path: str, *, upload_id: str, key: str, part_bytes: int) -> None:
        """A multipart upload was begun for a file."""
        self._append({"event": "begun", "path": path, "upload_id": upload_id, "key": key, "part_bytes": part_bytes})

    def part(self, path: str, part: Part, *, crc: int) -> None:
        """A part is in the store."""
        self._append(
            {"event": "part", "path": path, "number": part.number, "size_bytes": part.size_bytes, "etag": part.etag, "crc": crc}
        )

    def stored(self, entry: FileEntry) -> None:
        """A file is in the store whole, and was verified."""
        self._append({"event": "stored", "entry": entry.model_dump(mode="json")})

    def dropped(self, path: str) -> None:
        """What was known of a file is void: it is sent again from the start."""
        self._append({"event": "dropped", "path": path})
