"""How a file is cut into the parts of a multipart upload, or the ranges of a download."""

from __future__ import annotations

MIB = 1 << 20
DEFAULT_PART_BYTES = 16 * MIB
NEAR_PART_BYTES = 64 * MIB
"""Where the store is near, what is done for each part takes longer than its way there."""
LARGE_RANGE_BYTES = 32 * MIB
"""What is fetched twice after a crash is no more than a few of them."""
ENOUGH_PARTS = 8
"""With fewer of a file, some connections would be done with it long before the others."""
LONGEST_S = 0.25
"""So long a part has the link to itself, at most: what goes first waits for those that are under way."""


def usual_part_bytes(size_bytes: int, *, is_near: bool, bytes_per_s: float | None) -> int:
    """Return how large the parts of a file should be.

    Args:
        size_bytes: Of the file.
        is_near: The store answers at once.
        bytes_per_s: What the link carries; ``None``: it is not known.
    """
    most = NEAR_PART_BYTES if is_near else DEFAULT_PART_BYTES
    if bytes_per_s is not None:
        most = min(most, int(bytes_per_s * LONGEST_S))
    return max(DEFAULT_PART_BYTES, min(most, size_bytes // ENOUGH_PARTS) // MIB * MIB)


def range_bytes(size_bytes: int) -> int:
    """Return how large the ranges are in which a file is fetched: fewer requests of large ones, enough of all others."""
    return max(DEFAULT_PART_BYTES, min(LARGE_RANGE_BYTES, size_bytes // ENOUGH_PARTS) // MIB * MIB)


def part_size(size_bytes: int, *, wanted_bytes: int, min_part_bytes: int, max_parts: int) -> int:
    """Return the part size for a file: ``wanted_bytes``, or the next whole MiB with which ``max_parts`` are enough."""
    wanted_bytes, least = max(wanted_bytes, min_part_bytes), -(-size_bytes // max_parts)
    return wanted_bytes if least <= wanted_bytes else -(-least // MIB) * MIB


def part_ranges(size_bytes: int, *, part_bytes: int) -> list[tuple[int, int]]:
    """Return ``(offset, length)`` of each part in order. An empty file has one, empty."""
    if size_bytes == 0:
        return [(0, 0)]
    return [(offset, min(part_bytes, size_bytes - offset)) for offset in range(0, size_bytes, part_bytes)]
