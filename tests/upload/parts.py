"""Files in small parts on their way to a store in memory that can be slow to answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sidecar.catalog.catalog import Catalog
from sidecar.catalog.events import Events
from sidecar.core.format.found_checkpoint import FoundFile
from sidecar.lifecycle.deadline import Deadline
from sidecar.lifecycle.lease import NoLease
from sidecar.store.protocol import Part, Store
from sidecar.store.slice import FileSlice
from sidecar.transfer.executor import StoreExecutor
from sidecar.transfer.health import Health
from sidecar.transfer.rate_gate import RateGate
from sidecar.upload.commit.committer import Committer
from sidecar.upload.context import StoreLimits, UploadContext
from sidecar.upload.schedule.flush_control import FlushControl
from sidecar.upload.send.deduplicate import Deduplicator
from sidecar.upload.send.file_transfer import FileTransfer
from sidecar.upload.send.journal import Journal
from sidecar.upload.send.payloads import Payloads
from sidecar.upload.send.store_link import StoreLink
from sidecar.volume.opener import Folder
from sidecar.volume.unfinished import Unfinished
from tests.store.memory import MemoryStore

PART_BYTES = 1000


class DistantStore(MemoryStore):
    """Accepts each part at once, and answers when ``reached`` is set or that number of parts has come."""

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


class OpenGuard:
    """The checkpoint may be written."""

    async def pass_through(self, *, asks_now: bool = False) -> None:
        return


@contextmanager
def executor(*, concurrency: int, part_bytes: int | None = PART_BYTES) -> Iterator[StoreExecutor]:
    """Threads for that number of requests."""
    running = StoreExecutor(concurrency=concurrency, gate=RateGate(None), health=Health(), part_bytes=part_bytes)
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


def transfer(path: Path, store: Store, with_transfers: StoreExecutor, *, journal: Path, growing: bool = False) -> FileTransfer:
    """Return what sends a file, as it is now; or, ``growing``, while it may still be written."""
    name, source = path.parent.name, Unfinished(Folder(path.parent.parent) / path.parent.name)
    (source.see_growing if growing else source.see)(found(path))

    return FileTransfer(
        name,
        StoreLink(store, store.probe(), with_transfers, Deduplicator()),
        payloads=Payloads(name=name, source=source, store=store, capabilities=store.probe(), gate=with_transfers.gate),
        journal=Journal(Folder(journal.parent) / f"{name}@{journal.name}"),
        guard=OpenGuard(),
    )


async def ended(one: FileTransfer) -> None:
    """Wait for the end, and give its journal's file back."""
    await one.finished()
    one.journal.close()


class LastingPod(NoLease):
    """It stays, may write, and found nothing damaged."""

    def reason(self, name: str, crc: str) -> str | None:
        return None

    def trainer_alive(self) -> bool:
        return True

    def attempt(self) -> str:
        return "0"


def uploads(store: Store, running: StoreExecutor) -> UploadContext:
    """Return what uploads to a store share."""
    pod = LastingPod()
    return UploadContext(
        store=store,
        limits=StoreLimits(store.probe()),
        executor=running,
        committer=Committer(store, running),
        catalog=Catalog(Events()),
        flush=FlushControl(running, Events()),
        pod=pod,
        deadline=Deadline(),
        lease=pod,
        quarantine=pod,
        raises_defects=True,
    )
