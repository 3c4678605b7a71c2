"""Batch of small files, sent by one thread; each file is confirmed and recorded individually."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from sidecar.core.format import checksum
from sidecar.errors import CorruptObject
from sidecar.store.protocol import Stored
from sidecar.transfer.request_batch import RequestBatch
from sidecar.upload.send.payloads import Payloads
from sidecar.upload.send.work_item import Upload


class SmallBatch(RequestBatch[Upload]):
    """Small files that one thread sends. ``more`` and ``stored`` are called in that thread.

    Args:
        first: The first file.
        more: Returns the next file; ``None``: there is none now.
        at_once: Number of requests in flight.
        payloads: Sends the files.
        reads_back: Whether each object is read again to verify it.
        stored: Called with each file that is in the store, its object and CRC64NVME.
    """

    def __init__(
        self,
        first: Upload,
        more: Callable[[], Upload | None],
        *,
        at_once: int,
        payloads: Payloads,
        reads_back: bool,
        stored: Callable[[Upload, Stored, int], None],
    ) -> None:
        super().__init__(more, at_once=at_once, taken=[first])
        self.done: list[Upload] = []
        self._payloads = payloads
        self._reads_back = reads_back
        self._stored = stored

    @property
    def sent_bytes(self) -> int:
        """Sum of the sizes of the files sent."""
        return sum(upload.file.size_bytes for upload in self.done)

    def send(self) -> None:
        """Send files until the time of the batch is over. Called again after an error, it takes no further files.

        Raises:
            CorruptObject: The object differs from the file.
            CheckpointChanged, CheckpointRejected, StoreError: As ``Payloads.put_file``.
        """
        self.run(self._begin, self._end)

    def _begin(self, upload: Upload) -> AbstractContextManager[Callable[[], tuple[Stored, int]]]:
        return self._payloads.putting_file(upload.file.path, upload.key, upload.file.size_bytes)

    def _end(self, upload: Upload, sent: tuple[Stored, int]) -> None:
        stored, crc = sent
        if self._reads_back and self._payloads.read_back(upload.key, stored.etag) != crc:
            raise CorruptObject(upload.key, want=f"crc64nvme {checksum.to_text(crc)}", got="another one in the store")
        self._stored(upload, stored, crc)
        self.done.append(upload)
