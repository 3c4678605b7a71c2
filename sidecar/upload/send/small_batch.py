"""Batch of small files, sent by one thread; each file is confirmed and recorded individually."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sidecar.core.format import checksum
from sidecar.errors import AlreadyExists, CorruptObject
from sidecar.store.protocol import Stored
from sidecar.transfer.request_batch import RequestBatch
from sidecar.upload.send.payloads import Payloads
from sidecar.upload.send.work_item import Upload


class SmallBatch(RequestBatch[Upload]):
    """Small files that one thread sends. ``more``, ``begin`` and ``stored`` are called in that thread.

    Args:
        first: The first file.
        more: Returns the next file; ``None``: there is none now.
        at_once: Number of requests in flight.
        payloads: Sends the files.
        reads_back: Whether each object is read again to verify it.
        begin: Called before each try; returns whether the store is to refuse the key if it has an object.
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
        begin: Callable[[str], bool],
        stored: Callable[[Upload, Stored, int], None],
    ) -> None:
        super().__init__(more, at_once=at_once, taken=[first])
        self.done: list[Upload] = []
        self.refused: list[Upload] = []
        """Files that the store did not take, because their key has an object."""
        self._payloads = payloads
        self._reads_back = reads_back
        self._begin_write = begin
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

    @contextmanager
    def _begin(self, upload: Upload) -> Iterator[Callable[[], tuple[Stored, int] | None]]:
        path, size_bytes, is_first = upload.file.path, upload.file.size_bytes, self._begin_write(upload.key)
        with self._payloads.putting_file(path, upload.key, size_bytes, only_if_absent=is_first) as answered:
            yield lambda: _unless_refused(answered) if is_first else answered()

    def _end(self, upload: Upload, sent: tuple[Stored, int] | None) -> None:
        if sent is None:
            self.refused.append(upload)
            self.take_no_more()  # others may be refused, too: it is found out first
            return
        stored, crc = sent
        if self._reads_back and self._payloads.read_back(upload.key, stored.etag) != crc:
            raise CorruptObject(upload.key, want=f"crc64nvme {checksum.to_text(crc)}", got="another one in the store")
        self._stored(upload, stored, crc)
        self.done.append(upload)


def _unless_refused(answered: Callable[[], tuple[Stored, int]]) -> tuple[Stored, int] | None:
    """Return the answer, or ``None`` if the key has an object. The other requests in flight go on."""
    try:
        return answered()
    except AlreadyExists:
        return None
