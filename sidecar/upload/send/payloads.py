"""Payloads: blocking calls that send a file or a part of it, or read it for a comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from sidecar.core.format import checksum
from sidecar.errors import CheckpointChanged, Stopped, StoreError, StoreUnavailable
from sidecar.store.protocol import Capabilities, Part, Store, Stored, Verification
from sidecar.store.slice import BLOCK_BYTES, FileSlice, Gate
from sidecar.upload.send.hedged_request import SendTry
from sidecar.upload.send.journal import FileProgress

Range = tuple[int, int]
"""Offset and length in bytes."""


class Source(Protocol):
    """Files that can be opened in the version that was found."""

    def open(self, path: str) -> AbstractContextManager[int]:
        """Open a file for reading and yield its descriptor.

        Raises:
            CheckpointChanged: It is another version; checked at the start and at the end of the context.
            CheckpointRejected: It is gone, or no regular file.
            UnreadableFile: This user may not read it.
        """
        ...


class Payloads:
    """Blocking calls. Each opens the file itself, so no other code can close the descriptor of a late thread."""

    def __init__(self, *, name: str, source: Source, store: Store, capabilities: Capabilities, gate: Gate) -> None:
        self._name = name
        self._source = source
        self._store = store
        self._with_md5 = capabilities.verification is Verification.MD5
        self.gate = gate

    def put_file(
        self, path: str, key: str, size_bytes: int, send_try: SendTry | None = None, *, only_if_absent: bool = False
    ) -> tuple[Stored, int]:
        """Send a file in one request; return the object and its CRC64NVME.

        Raises:
            AlreadyExists: ``only_if_absent``, and the object exists.
        """
        with self.putting_file(path, key, size_bytes, send_try, only_if_absent=only_if_absent) as answered:
            return answered()

    @contextmanager
    def putting_file(
        self, path: str, key: str, size_bytes: int, send_try: SendTry | None = None, *, only_if_absent: bool = False
    ) -> Iterator[Callable[[], tuple[Stored, int]]]:
        """Send a file; yield a function that waits for the answer and returns the result of ``put_file``.

        The result is valid after the end of the context, which checks that the file is unchanged.
        """
        with self._source.open(path) as fd:
            body = self._slice(fd, path, (0, size_bytes), send_try)
            with self._store.putting_file(key, body, only_if_absent=only_if_absent) as answered:
                yield lambda: (answered(), body.crc64nvme)

    def put_part(
        self, path: str, progress: FileProgress, number: int, extent: Range, send_try: SendTry | None = None
    ) -> tuple[Part, int]:
        """Send a part; return it and its CRC64NVME.

        Raises:
            Stopped: The gate is closed, or another try of the same part arrived first.
        """
        with self._source.open(path) as fd:
            body = self._slice(fd, path, extent, send_try)
            try:
                part = self._store.upload_part(progress.key, progress.upload_id, number, body)
            except StoreError as error:
                if send_try is not None and send_try.is_cancelled:
                    raise Stopped("another try arrived first") from error
                if isinstance(error, StoreUnavailable):
                    # Some servers always answer 500 to a part of an upload that they no longer know.
                    next(iter(self._store.list_parts(progress.key, progress.upload_id)), None)
                raise
        return part, body.crc64nvme

    def checksums(self, path: str, ranges: list[Range], wanted: list[int] | None = None) -> list[int]:
        """Return the CRC64NVME of ranges of a file, up to the first one that differs from ``wanted``; ``None``: all."""
        found: list[int] = []
        with self._source.open(path) as fd:
            for number, extent in enumerate(ranges):
                found.append(self._slice(fd, path, extent).crc64nvme_ahead())
                if wanted is not None and found[-1] != wanted[number]:
                    break
        return found

    def is_still(self, path: str, ranges: list[Range], wanted: list[int]) -> bool:
        """Whether ranges of a file have these checksums."""
        try:
            return self.checksums(path, ranges, wanted) == wanted
        except CheckpointChanged:
            return False

    def read_back(self, key: str, etag: str) -> int:
        """Return the CRC64NVME of an object."""
        crc, buffer = 0, memoryview(bytearray(BLOCK_BYTES))
        with self._store.read(key, etag=etag) as body:
            while count := body.readinto(buffer):
                crc = checksum.checksum(buffer[:count], crc)
        return crc

    def _slice(self, fd: int, path: str, extent: Range, send_try: SendTry | None = None) -> FileSlice:
        name = f"{self._name}/{path}"
        if send_try is None:
            return FileSlice(fd, *extent, gate=self.gate, name=name, with_md5=self._with_md5)
        body = FileSlice(fd, *extent, gate=send_try, name=name, with_md5=self._with_md5, on_end=send_try.all_sent)
        return send_try.carries(body)
