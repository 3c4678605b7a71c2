"""Body of an upload: a byte range of an open file, checksummed while it is read."""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from awscrt.checksums import crc64nvme

from sidecar.errors import CheckpointChanged, Stopped, UnreadableFile

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

BLOCK_BYTES = 512 << 10
"""Largest single read from the file. It fits a core's cache, and bounds the time until a closed gate stops the transfer."""


class Gate(Protocol):
    """Rate limit and stop switch of transfers."""

    def pass_through(self, size_bytes: int) -> None:
        """Wait until ``size_bytes`` more may be sent.

        Raises:
            Stopped: The gate was closed; the transfer must end.
        """
        ...


class OpenGate:
    """A gate without a rate limit."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def close(self) -> None:
        """Stop every transfer at its next block."""
        self._closed.set()

    def pass_through(self, size_bytes: int) -> None:  # noqa: D102
        if self._closed.is_set():
            raise Stopped("transfers were stopped")


class FileSlice(io.RawIOBase):
    """Bytes ``[offset, offset + size_bytes)`` of a file, readable, and rewindable for a retry.

    Computes the CRC64NVME, and on request the MD5, while it is read; both are complete at EOF.
    """

    def __init__(
        self,
        fd: int,
        offset: int,
        size_bytes: int,
        *,
        gate: Gate,
        name: str = "",
        with_md5: bool = False,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        """Start at the first byte. ``on_end`` is called at EOF, after the last block was sent."""
        super().__init__()
        self.fd = fd
        self.offset = offset
        self.size_bytes = size_bytes
        self.name = name
        self.gate = gate
        self.with_md5 = with_md5
        self._on_end = on_end
        self._position = 0
        self._checked = 0
        self._crc = 0
        self._md5: hashlib._Hash | None = None
        self.seek(0)

    @property
    def crc64nvme(self) -> int:
        """Checksum of the whole slice. ``ValueError`` before EOF."""
        self._require_end()
        return self._crc

    @property
    def md5(self) -> bytes:
        """MD5 of the whole slice. ``ValueError`` before EOF, and without ``with_md5``."""
        self._require_end()
        if self._md5 is None:
            raise ValueError("the slice was made without MD5")
        return self._md5.digest()

    def crc64nvme_ahead(self) -> int:
        """Read the slice once in advance and return its checksum, for stores that need it before the body.

        Raises:
            CheckpointChanged: The file is shorter than the slice.
            Stopped: The gate was closed.
        """
        crc = 0
        for block in self._blocks_ahead():
            crc = crc64nvme(block, crc)
        return crc

    def sha256_ahead(self) -> str:
        """Read the slice once in advance and return its SHA-256 in hexadecimal. Raises as ``crc64nvme_ahead``."""
        digest = hashlib.sha256()
        for block in self._blocks_ahead():
            digest.update(block)
        return digest.hexdigest()

    def md5_ahead(self) -> bytes:
        """Read the slice once in advance and return its MD5. Raises as ``crc64nvme_ahead``."""
        digest = hashlib.md5(usedforsecurity=False)
        for block in self._blocks_ahead():
            digest.update(block)
        return digest.digest()

    def _blocks_ahead(self) -> Iterator[memoryview]:
        buffer, done = memoryview(bytearray(min(BLOCK_BYTES, self.size_bytes))), 0
        while done < self.size_bytes:
            self.gate.pass_through(0)  # checks for a stop without counting bytes as sent
            block = buffer[: min(BLOCK_BYTES, self.size_bytes - done)]
            count = self._pread(block, done)
            yield block[:count]
            done += count

    def _pread(self, buffer: memoryview, position: int) -> int:
        try:
            count = os.preadv(self.fd, [buffer], self.offset + position)
        except OSError as error:
            why = f"{self.name}: {error.strerror or error}: is the volume still sound? It is tried again"
            raise UnreadableFile(why) from error
        if not count:
            raise CheckpointChanged(self.name)
        return count

    def _require_end(self) -> None:
        if self._checked != self.size_bytes:
            raise ValueError(f"{self.name}: {self._checked} of {self.size_bytes} bytes were read, the checksum is not complete")

    def readable(self) -> bool:  # noqa: D102
        return True

    def seekable(self) -> bool:  # noqa: D102
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill the beginning of ``buffer`` with at most ``BLOCK_BYTES`` and return the count; 0 at EOF.

        Raises:
            CheckpointChanged: The file is shorter than the slice.
            UnreadableFile: The volume failed to read it.
            Stopped: The gate was closed.
        """
        block = buffer if type(buffer) is memoryview and buffer.format == "B" else memoryview(buffer).cast("B")
        wanted = min(self.size_bytes - self._position, BLOCK_BYTES, len(block))
        if not wanted:
            self._on_end()
            return 0
        self.gate.pass_through(wanted)
        count = self._pread(block[:wanted], self._position)
        self._check(block[:count])
        self._position += count
        return count

    def _check(self, block: memoryview) -> None:
        if self._position == self._checked:
            self._crc = crc64nvme(block, self._crc)
            if self._md5 is not None:
                self._md5.update(block)
            self._checked += len(block)

    def each_block(self, take: Callable[[memoryview], None]) -> None:
        """Rewind, and pass the whole slice to ``take``, block by block. The buffer is reused."""
        self.seek(0)
        buffer = memoryview(bytearray(min(BLOCK_BYTES, self.size_bytes)))
        while count := self.readinto(buffer):
            take(buffer[:count])

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:  # noqa: D102
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size_bytes}[whence]
        self._position = max(0, min(self.size_bytes, base + offset))
        if self._position == 0:  # the checksums start again with the bytes
            self._checked, self._crc = 0, 0
            self._md5 = hashlib.md5(usedforsecurity=False) if self.with_md5 else None
        return self._position

    def tell(self) -> int:  # noqa: D102
        return self._position

    def __len__(self) -> int:
        return self.size_bytes


@contextmanager
def slice_of(content: bytes, *, name: str) -> Iterator[FileSlice]:
    """Yield a body that is in memory, with its MD5."""
    fd = os.memfd_create(name)
    try:
        os.write(fd, content)
        yield FileSlice(fd, 0, len(content), gate=OpenGate(), name=name, with_md5=True)
    finally:
        os.close(fd)
