"""The body of every upload: a window of an open file that checks itself while it is read."""

from __future__ import annotations

import hashlib
import io
import os
import threading
from typing import Protocol

from awscrt.checksums import crc64nvme

from sidecar.errors import CheckpointChanged, Stopped

BLOCK_BYTES = 1 << 20
"""Largest read from the file at once: bounds memory and the time until a closed gate is noticed."""


class Gate(Protocol):
    """Decides when the next bytes may pass; shared by all transfers."""

    def pass_through(self, size_bytes: int) -> None:
        """Return when ``size_bytes`` more may be sent.

        Raises:
            Stopped: The gate was closed; the transfer must end.
        """
        ...


class OpenGate:
    """Lets everything through until it is closed."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def close(self) -> None:
        """Stop every transfer at its next block."""
        self._closed.set()

    def pass_through(self, size_bytes: int) -> None:  # noqa: D102
        if self._closed.is_set():
            raise Stopped("transfers were stopped")


class FileSlice(io.RawIOBase):
    """Bytes ``[offset, offset + size_bytes)`` of a file, readable and rewindable (an HTTP client rewinds to send again).

    Computes the CRC64NVME, and the MD5 where asked, of what is read from the beginning on; both are complete when the
    slice has been read to its end.
    """

    def __init__(self, fd: int, offset: int, size_bytes: int, *, gate: Gate, name: str = "", with_md5: bool = False) -> None:
        super().__init__()
        self.fd = fd
        self.offset = offset
        self.size_bytes = size_bytes
        self.name = name
        self.gate = gate
        self.with_md5 = with_md5
        self._position = 0
        self._checked = 0
        self._crc = 0
        self._md5: hashlib._Hash | None = hashlib.md5(usedforsecurity=False) if with_md5 else None

    @property
    def crc64nvme(self) -> int:
        """Checksum of the whole slice. Only after it was read to its end."""
        self._require_end()
        return self._crc

    @property
    def md5(self) -> bytes:
        """MD5 of the whole slice. Only after it was read to its end, and only ``with_md5``."""
        self._require_end()
        if self._md5 is None:
            raise ValueError("the slice was made without MD5")
        return self._md5.digest()

    def crc64nvme_ahead(self) -> int:
        """Read the slice once beforehand and return its checksum: for stores that want it before the body.

        Raises:
            CheckpointChanged: The file is shorter than the slice.
            Stopped: The gate was closed.
        """
        crc, done = 0, 0
        while done < self.size_bytes:
            self.gate.pass_through(0)  # to be stopped, not to be counted as sent
            block = os.pread(self.fd, min(BLOCK_BYTES, self.size_bytes - done), self.offset + done)
            if not block:
                raise CheckpointChanged(self.name)
            crc = crc64nvme(block, crc)
            done += len(block)
        return crc

    def _require_end(self) -> None:
        if self._checked != self.size_bytes:
            raise ValueError(f"{self.name}: {self._checked} of {self.size_bytes} bytes were read, the checksum is not complete")

    def readable(self) -> bool:  # noqa: D102
        return True

    def seekable(self) -> bool:  # noqa: D102
        return True

    def read(self, size: int | None = -1, /) -> bytes:  # noqa: D102
        left = self.size_bytes - self._position
        wanted = min(left, BLOCK_BYTES if size is None or size < 0 else min(size, BLOCK_BYTES))
        if wanted == 0:
            return b""
        self.gate.pass_through(wanted)
        block = os.pread(self.fd, wanted, self.offset + self._position)
        if not block:
            raise CheckpointChanged(self.name)
        self._check(block)
        self._position += len(block)
        return block

    def _check(self, block: bytes) -> None:
        if self._position == 0:  # also after a rewind: the checksum is that of the bytes sent last
            self._checked, self._crc = 0, 0
            self._md5 = hashlib.md5(usedforsecurity=False) if self.with_md5 else None
        if self._position == self._checked:
            self._crc = crc64nvme(block, self._crc)
            if self._md5 is not None:
                self._md5.update(block)
            self._checked += len(block)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:  # noqa: D102
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size_bytes}[whence]
        self._position = max(0, min(self.size_bytes, base + offset))
        return self._position

    def tell(self) -> int:  # noqa: D102
        return self._position

    def __len__(self) -> int:
        return self.size_bytes
