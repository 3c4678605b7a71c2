"""CRC64NVME: the end-to-end checksum from the writer's disk through the store to the reader's disk."""

from __future__ import annotations

import re
from collections.abc import Iterable

from awscrt.checksums import combine_crc64nvme, crc64nvme

_TEXT = re.compile(r"[0-9a-f]{16}", re.ASCII)


def checksum(content: bytes | memoryview, previous: int = 0) -> int:
    """Return the CRC64NVME of ``content``, continued from ``previous``."""
    crc: int = crc64nvme(content, previous)
    return crc


def combined(pieces: Iterable[tuple[int, int]]) -> int:
    """Return the checksum of a whole from ``(checksum, size_bytes)`` of its pieces in order, without reading them again."""
    whole = 0
    for crc, size_bytes in pieces:
        whole = combine_crc64nvme(whole, crc, size_bytes)
    return whole


def text_of(content: bytes | memoryview) -> str:
    """Return the checksum of ``content`` as manifests write it."""
    return to_text(checksum(content))


def to_text(crc: int) -> str:
    """Return the 16 hexadecimal digits used in manifests."""
    return f"{crc:016x}"


def from_text(text: str) -> int:
    """Return the checksum of 16 hexadecimal digits.

    Raises:
        ValueError: The text is something else.
    """
    if not _TEXT.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is not a CRC64NVME of 16 lower-case hexadecimal digits")
    return int(text, 16)
