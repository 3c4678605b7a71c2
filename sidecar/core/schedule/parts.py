"""Part sizes of multipart uploads, and range sizes of downloads."""

from __future__ import annotations

MIB = 1 << 20
DEFAULT_PART_BYTES = 16 * MIB
NEAR_PART_BYTES = 64 * MIB
"""Part size for a near store, where the fixed cost of a part exceeds the round trip."""
LARGE_RANGE_BYTES = 32 * MIB
"""Range size of large files. After a crash, only a few ranges are fetched again."""
MIN_PART_BYTES, LARGEST_PART_BYTES, MAX_PARTS = 5 * MIB, 5 << 30, 10_000
"""Limits of S3; other stores may have others. Source: S3 user guide, "Amazon S3 multipart upload limits"."""
LEAST_PARTS = 1000
"""Every store is assumed to take this many parts of an object: with 5 GiB each they hold 4.9 TiB."""
ENOUGH_PARTS = 8
"""Preferred minimum of parts per file: with fewer, some connections are idle while others still send."""
LONGEST_S = 0.25
"""Maximum time in seconds of one part at full link rate: a preempting upload waits for the parts in flight."""


def usual_part_bytes(size_bytes: int, *, is_near: bool, bytes_per_s: float | None) -> int:
    """Return the preferred part size of a file in bytes.

    Args:
        size_bytes: Size of the file.
        is_near: The store's round trip is negligible.
        bytes_per_s: Rate of the link; ``None``: unknown.
    """
    most = NEAR_PART_BYTES if is_near else DEFAULT_PART_BYTES
    if bytes_per_s is not None:
        most = min(most, int(bytes_per_s * LONGEST_S))
    return max(DEFAULT_PART_BYTES, min(most, size_bytes // ENOUGH_PARTS) // MIB * MIB)


def range_bytes(size_bytes: int) -> int:
    """Return the range size in bytes for the download of a file: few requests for large files, enough ranges for others."""
    return max(DEFAULT_PART_BYTES, min(LARGE_RANGE_BYTES, size_bytes // ENOUGH_PARTS) // MIB * MIB)


def equal_parts(max_parts: int) -> int:
    """Return how many parts at the beginning of an upload have the size of the first one."""
    return max(1, max_parts // 2)


def part_size(size_bytes: int, *, wanted_bytes: int, min_part_bytes: int, max_parts: int) -> int:
    """Return the part size for a file of known size; all its parts but the last have it.

    Returns:
        ``wanted_bytes``, or the next whole MiB with which ``equal_parts`` suffice; at most 5 GiB, which suffices for any file
        that S3 takes.
    """
    wanted_bytes, least = max(wanted_bytes, min_part_bytes), -(-size_bytes // equal_parts(max_parts))
    return wanted_bytes if least <= wanted_bytes else max(wanted_bytes, min(-(-least // MIB) * MIB, LARGEST_PART_BYTES))


def upload_ranges(size_bytes: int, *, part_bytes: int, max_parts: int, whole_only: bool = False) -> list[tuple[int, int]]:
    """Return ``(offset, length)`` of each part of an upload in order. An empty file has one empty part.

    A part's offset depends on its number alone, never on the size of the file, so parts sent while the file grew stay valid.
    The first half of ``max_parts`` has ``part_bytes`` each, because some stores require equal parts; after that the size
    doubles every ``max_parts // 25`` parts, up to 5 GiB. So an initial 5 MiB suffices for 8 TiB.

    Args:
        size_bytes: Size of the file, or of its finished beginning.
        part_bytes: Size of the first part.
        max_parts: Maximum number of parts in the store.
        whole_only: The file still grows: leave out an incomplete last part, and all beyond the last possible part.

    Raises:
        ValueError: The file is larger than ``most_bytes``.
    """
    if size_bytes < part_bytes:
        return [] if whole_only else [(0, size_bytes)]
    ranges: list[tuple[int, int]] = []
    offset = 0
    for count, length in _runs(part_bytes, max_parts):
        end = min(size_bytes, offset + count * length)
        ranges += [(begin, min(length, end - begin)) for begin in range(offset, end, length)]
        offset = end
    if whole_only:
        return ranges[:-1] if ranges[-1][1] < _length(len(ranges), part_bytes, max_parts) else ranges
    if offset < size_bytes:
        raise ValueError(f"{size_bytes} bytes are more than {max_parts} parts hold whose first has {part_bytes} bytes")
    return ranges


def most_bytes(*, part_bytes: int, max_parts: int) -> int:
    """Return the maximum size of a file whose upload begins with parts of ``part_bytes``."""
    return sum(count * length for count, length in _runs(part_bytes, max_parts))


def largest_file_bytes(max_parts: int) -> int:
    """Return the maximum size of any file. Source: S3 user guide, "Amazon S3 multipart upload limits": 48.8 TiB."""
    return max_parts * LARGEST_PART_BYTES


def max_parts_after_refusal(number: int, *, max_parts: int) -> int:
    """Return the store's maximum number of parts after it refused a part of this number as an invalid argument.

    A number up to ``LEAST_PARTS`` had another reason and changes nothing, so one wrong answer cannot rule out large files.

    ``max_parts``: the limit assumed so far.
    """
    return number - 1 if LEAST_PARTS < number <= max_parts else max_parts


def _length(number: int, part_bytes: int, max_parts: int) -> int:
    """Return the size of a part other than the last."""
    *first, (_, last_length) = _runs(part_bytes, max_parts)
    for count, length in first:
        if number <= count:
            return length
        number -= count
    return last_length


def _runs(part_bytes: int, max_parts: int) -> list[tuple[int, int]]:
    """Return the runs of equal parts in order, as ``(number of parts, size)``."""
    left = max_parts - equal_parts(max_parts)
    runs = [(max_parts - left, part_bytes)]
    largest_bytes = max(part_bytes, LARGEST_PART_BYTES)
    while left:
        part_bytes = min(2 * part_bytes, largest_bytes)
        count = left if part_bytes == largest_bytes else min(left, max(1, max_parts // 25))
        runs.append((count, part_bytes))
        left -= count
    return runs


def part_ranges(size_bytes: int, *, part_bytes: int) -> list[tuple[int, int]]:
    """Return ``(offset, length)`` of a download's ranges in order, all of one size. An empty file has one empty range."""
    if size_bytes == 0:
        return [(0, 0)]
    return [(offset, min(part_bytes, size_bytes - offset)) for offset in range(0, size_bytes, part_bytes)]
