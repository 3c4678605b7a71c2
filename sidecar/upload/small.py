"""Small files, one after another in one thread: the way from a thread to the event loop and back costs more than the file."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sidecar.core import checksum
from sidecar.errors import CorruptObject
from sidecar.store.protocol import Stored
from sidecar.upload.bodies import Bodies

if TYPE_CHECKING:
    from sidecar.upload.pieces import Upload

MOMENT_S = 0.05
"""So long a thread goes on to the next file: a newer checkpoint waits no longer than that and one request."""


class SmallFiles:
    """One thread's share. ``stored`` is told of each file as soon as it is in the store; both calls are made in the thread."""

    def __init__(
        self,
        first: Upload,
        more: Callable[[], Upload | None],
        *,
        bodies: Bodies,
        reads_back: bool,
        stored: Callable[[Upload, Stored, int], None],
    ) -> None:
        self.current: Upload | None = first
        """What is sent now, or could not be sent."""
        self.done: list[Upload] = []
        self._more = more
        self._bodies = bodies
        self._reads_back = reads_back
        self._stored = stored
        self._until_s = time.monotonic() + MOMENT_S

    @property
    def sent_bytes(self) -> int:
        """Sum of what is in the store."""
        return sum(upload.file.size_bytes for upload in self.done)

    def send(self) -> None:
        """Send files until the moment is over. Called again after an error, it sends the one that failed, and no other.

        Raises:
            CorruptObject: The store has something else than what was sent.
            CheckpointChanged, CheckpointRejected, StoreError: As ``Bodies.put_file`` does.
        """
        while (upload := self.current) is not None:
            try:
                self._send(upload)
            except BaseException:
                self._until_s = 0.0
                raise
            self.done.append(upload)
            self.current = self._more() if time.monotonic() < self._until_s else None

    def _send(self, upload: Upload) -> None:
        stored, crc = self._bodies.put_file(upload.file.path, upload.key, upload.file.size_bytes)
        if self._reads_back and self._bodies.read_back(upload.key, stored.etag) != crc:
            raise CorruptObject(upload.key, want=f"crc64nvme {checksum.to_text(crc)}", got="another one in the store")
        self._stored(upload, stored, crc)
