"""What runs in a thread: a file, or a part of one, on its way to the store or read to be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from sidecar.core.format import checksum
from sidecar.errors import CheckpointChanged, Stopped, StoreError, StoreUnavailable
from sidecar.store.protocol import Capabilities, Part, Store, Stored, Verification
from sidecar.store.slice import BLOCK_BYTES, FileSlice, Gate
from sidecar.upload.send.hedged_request import Outgoing
from sidecar.upload.send.journal import FileProgress

Range = tuple[int, int]
"""Offset and length in bytes."""


class Source(Protocol):
    """Files that can be opened as those that were seen."""

    def open(self, path: str) -> AbstractContextManager[int]:
        """Open a file for reading and yield its descriptor.

        Raises:
            CheckpointChanged: It is another one, also found out when the context ends.
            CheckpointRejected: It cannot be read.
        """
        ...


class Payloads:
    """Blocking calls. Each opens the file itself, so that nothing else can be closed under a thread that is late."""

    def __init__(self, *, name: str, source: Source, store: Store, capabilities: Capabilities, gate: Gate) -> None:
        self._name = name
        self._source = source
        self._store = store
        self._with_md5 = capabilities.verification is Verification.MD5
        self._gate = gate

    def outgoing(self, on_left: Callable[[], object] = lambda: None) -> Outgoing:
        """Return what a body is sent through. ``on_left`` is told when all bytes have left."""
        return Outgoing(self._gate, on_left)

    def put_file(self, path: str, key: str, size_bytes: int, outgoing: Outgoing | None = None) -> tuple[Stored, int]:
        """Send a file in one request; return the object and its CRC64NVME."""
        with self.putting_file(path, key, size_bytes, outgoing) as answered:
            return answered()

    @contextmanager
    def putting_file(
        self, path: str, key: str, size_bytes: int, outgoing: Outgoing | None = None
    ) -> Iterator[Callable[[], tuple[Stored, int]]]:
        """Send a file; what this yields waits for the answer and returns what ``put_file`` does.

        It counts once the context has ended, and the file is known to be what it was.
        """
        with self._source.open(path) as fd:
            body = self._slice(fd, path, (0, size_bytes), outgoing)
            with self._store.putting_file(key, body) as answered:
                yield lambda: (answered(), body.crc64nvme)

    def put_part(
        self, path: str, progress: FileProgress, number: int, place: Range, outgoing: Outgoing | None = None
    ) -> tuple[Part, int]:
        """Send a part; return it and its CRC64NVME.

        Raises:
            Stopped: The gate is closed, or another try of the same part arrived first.
        """
        with self._source.open(path) as fd:
            body = self._slice(fd, path, place, outgoing)
            try:
                part = self._store.upload_part(progress.key, progress.upload_id, number, body)
            except StoreError as error:
                if outgoing is not None and outgoing.is_given_up:
                    raise Stopped("another try arrived first") from error
                if isinstance(error, StoreUnavailable):
                    # Some servers answer 500 for ever to a part of an upload that they no longer know.
                    next(iter(self._store.list_parts(progress.key, progress.upload_id)), None)
                raise
        return part, body.crc64nvme

    def checksums(self, path: str, places: list[Range], wanted: list[int] | None = None) -> list[int]:
        """Return the CRC64NVME of ranges of a file, up to the first that is not the wanted one."""
        found: list[int] = []
        with self._source.open(path) as fd:
            for number, place in enumerate(places):
                found.append(self._slice(fd, path, place).crc64nvme_ahead())
                if wanted is not None and found[-1] != wanted[number]:
                    break
        return found

    def is_still(self, path: str, places: list[Range], wanted: list[int]) -> bool:
        """Whether ranges of a file have these checksums."""
        try:
            return self.checksums(path, places, wanted) == wanted
        except CheckpointChanged:
            return False

    def read_back(self, key: str, etag: str) -> int:
        """Return the CRC64NVME of an object."""
        crc, buffer = 0, memoryview(bytearray(BLOCK_BYTES))
        with self._store.read(key, etag=etag) as body:
            while count := body.readinto(buffer):
                crc = checksum.checksum(buffer[:count], crc)
        return crc

    def _slice(self, fd: int, path: str, place: Range, outgoing: Outgoing | None = None) -> FileSlice:
        name = f"{self._name}/{path}"
        if outgoing is None:
            return FileSlice(fd, *place, gate=self._gate, name=name, with_md5=self._with_md5)
        body = FileSlice(fd, *place, gate=outgoing, name=name, with_md5=self._with_md5, on_end=outgoing.on_left)
        return outgoing.carries(body)
