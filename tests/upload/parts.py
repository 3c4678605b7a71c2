"""Files in small parts on their way to a store in memory that can be slow to answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sidecar.core.local import FoundFile
from sidecar.store.memory import MemoryStore
from sidecar.store.protocol import Part
from sidecar.store.slice import FileSlice
from sidecar.transfer import Health, RateGate, Transfers
from sidecar.upload.bodies import Bodies
from sidecar.upload.journal import Journal
from sidecar.upload.sending import Sending
from sidecar.upload.unchanged import Unchanged
from sidecar.volume.unfinished import Unfinished

PART_BYTES = 1000


class DistantStore(MemoryStore):
    """Takes each part at once, and answers when ``reached`` is set or so many parts have come."""

    def __init__(self, enough: int = 10**9) -> None:
        super().__init__()
        self.came: list[int] = []
        """Numbers of the parts, in the order in which they came."""
        self.reached = threading.Event()
        self._enough = enough

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> Part:
        part = super().upload_part(key, upload_id, number, body)
        self.came.append(number)
        if len(self.came) >= self._enough:
            self.reached.set()
        assert self.reached.wait(20), f"only {len(self.came)} parts came before the first answer"
        return part


@contextmanager
def transfers(*, concurrency: int, part_bytes: int | None = PART_BYTES) -> Iterator[Transfers]:
    """Threads for so many requests."""
    running = Transfers(concurrency=concurrency, gate=RateGate(None), health=Health(), part_bytes=part_bytes)
    try:
        yield running
    finally:
        running.close()


def found(path: Path) -> FoundFile:
    """Return what a walk sees of a file."""
    status = path.stat()
    return FoundFile(path.name, status.st_size, status.st_mtime_ns, status.st_ino)


def written(folder: Path, *, parts: int) -> Path:
    """Make a checkpoint's directory with one file, each part of which is another."""
    folder.mkdir()
    path = folder / "model"
    path.write_bytes(b"".join(bytes([number]) * PART_BYTES for number in range(parts)))
    return path


def sending(path: Path, store: MemoryStore, with_transfers: Transfers, *, journal: Path, growing: bool = False) -> Sending:
    """Return what sends a file, as it is now; or, ``growing``, while it may still be written."""
    name, source = path.parent.name, Unfinished(path.parent)
    (source.see_growing if growing else source.see)(found(path))

    async def fence() -> None:
        return

    return Sending(
        name=name,
        bodies=Bodies(name=name, source=source, store=store, capabilities=store.probe(), gate=with_transfers.gate),
        store=store,
        capabilities=store.probe(),
        transfers=with_transfers,
        journal=Journal(journal),
        unchanged=Unchanged(),
        fence=fence,
    )


async def ended(one: Sending) -> None:
    """Wait for the end, and give its journal's file back."""
    await one.finished()
    one.journal.close()
