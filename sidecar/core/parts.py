"""How a file is cut into the parts of a multipart upload, or the ranges of a download."""

from __future__ import annotations

MIB = 1 << 20
DEFAULT_PART_BYTES = 16 * MIB


def part_size(size_bytes: int, *, wanted_bytes: int, min_part_bytes: int, max_parts: int) -> int:
    """Return the part size for a file: ``wanted_bytes``, or the next whole MiB with which ``max_parts`` are enough."""
    wanted_bytes, least = max(wanted_bytes, min_part_bytes), -(-size_bytes // max_parts)
    return wanted_bytes if least <= wanted_bytes else -(-least // MIB) * MIB


def part_ranges(size_bytes: int, *, part_bytes: int) -> list[tuple[int, int]]:
    """Return ``(offset, length)`` of each part in order. An empty file has one, empty."""
    if size_bytes == 0:
        return [(0, 0)]
    return [(offset, min(part_bytes, size_bytes - offset)) for offset in range(0, size_bytes, part_bytes)]
