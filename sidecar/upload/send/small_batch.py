"""Small files: one thread's share of them, each in the store, and written down, by itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from sidecar.core.format import checksum
from sidecar.errors import CorruptObject
from sidecar.store.protocol import Stored
from sidecar.transfer.request_batch import RequestBatch
from sidecar.upload.send.payloads import Payloads

if TYPE_CHECKING:
    from sidecar.upload.send.work_item import Upload


class SmallBatch:
    """One thread's share. ``stored`` is told of each file as soon as it is in the store; both calls are made in the thread."""

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
        self.done: list[Upload] = []
        self._turn = RequestBatch(more, at_once=at_once, taken=[first])
        self._payloads = payloads
        self._reads_back = reads_back
        self._stored = stored

    @property
    def left(self) -> list[Upload]:
        """What was taken and is not in the store."""
        return list(self._turn.left)

    @property
    def sent_bytes(self) -> int:
        """Sum of what is in the store."""
        return sum(upload.file.size_bytes for upload in self.done)

    def send(self) -> None:
        """Send files until the moment is over. Called again after an error, it sends those that are left, and no others.

        Raises:
            CorruptObject: The store has something else than what was sent.
            CheckpointChanged, CheckpointRejected, StoreError: As ``Payloads.put_file`` does.
        """
        self._turn.run(self._begin, self._end)

    def _begin(self, upload: Upload) -> AbstractContextManager[Callable[[], tuple[Stored, int]]]:
        return self._payloads.putting_file(upload.file.path, upload.key, upload.file.size_bytes)

    def _end(self, upload: Upload, sent: tuple[Stored, int]) -> None:
        stored, crc = sent
        if self._reads_back and self._payloads.read_back(upload.key, stored.etag) != crc:
            raise CorruptObject(upload.key, want=f"crc64nvme {checksum.to_text(crc)}", got="another one in the store")
        self._stored(upload, stored, crc)
        self.done.append(upload)
