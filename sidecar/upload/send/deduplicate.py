"""Deduplication: files of the newest committed checkpoint of this node, to be copied in the store instead of sent again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sidecar.core.format import checksum
from sidecar.core.format.found_checkpoint import FoundFile
from sidecar.core.format.manifest import FileEntry

LEAST_BYTES = 1 << 20
"""Minimum file size: sending a smaller file takes no longer than a copy."""


@dataclass(frozen=True, slots=True)
class Known:
    """A file in the store, and the checksum of its first part, by which most changed files are recognised."""

    entry: FileEntry
    first_crc: int

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The first part and the rest."""
        size, first = self.entry.size_bytes, self.entry.part_bytes or self.entry.size_bytes
        return [(0, first)] if first >= size else [(0, first), (first, size - first)]

    def has_checksums(self, crcs: list[int]) -> bool:
        """Whether these are the checksums of ``ranges``."""
        lengths = [length for _, length in self.ranges]
        if len(crcs) != len(lengths):
            return False
        return checksum.to_text(checksum.combined(zip(crcs, lengths, strict=True))) == self.entry.crc64nvme


class Deduplicator:
    """Files of the newest committed checkpoint, by path. Used from the event loop only."""

    def __init__(self) -> None:
        self._known: dict[str, Known] = {}

    def committed(self, entries: Iterable[FileEntry], first_crcs: Mapping[str, int]) -> None:
        """Replace the known files by those of the newest committed checkpoint."""
        large = [entry for entry in entries if entry.size_bytes >= LEAST_BYTES and entry.path in first_crcs]
        self._known = {entry.path: Known(entry, first_crcs[entry.path]) for entry in large}

    def candidate(self, file: FoundFile) -> Known | None:
        """Return the file of this path and size that is in the store; ``None``: there is none."""
        known = self._known.get(file.path)
        return known if known is not None and known.entry.size_bytes == file.size_bytes else None
