"""What was on its way when the marker came is neither waited for nor sent again."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from sidecar.catalog.catalog import Tracked
from sidecar.core.format.found_checkpoint import FoundFile
from sidecar.core.lifecycle.states import State
from sidecar.errors import NotFound
from sidecar.store.protocol import Part
from sidecar.store.slice import FileSlice
from sidecar.transfer.executor import StoreExecutor
from sidecar.upload.early.handover import Handover
from sidecar.upload.schedule.dispatcher import Dispatcher
from sidecar.upload.schedule.queue import report_uploading
from sidecar.upload.send.file_transfer import FileTransfer
from sidecar.upload.send.journal import Journal
from sidecar.volume.opener import Folder
from sidecar.volume.unfinished import Unfinished
from tests.store.memory import MemoryStore
from tests.upload.parts import (
    PART_BYTES,
    DistantStore,
    OpenGuard,
    ended,
    executor,
    found,
    transfer,
    uploads,
    written,
)
from tests.upload.test_job import finished

PARTS = 6


class RefusingStore(DistantStore):
    """Refuses what was on its way."""

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> Part:
        first = not self.reached.is_set()
        part = super().upload_part(key, upload_id, number, body)
        if first:
            raise NotFound(key)
        return part


@dataclass
class Early:
    """Three parts of a file on their way."""

    path: Path
    store: DistantStore
    running: StoreExecutor
    stream: Dispatcher
    before_marker: Handover

    def after_marker(self) -> FileTransfer:
        """Return the checkpoint's own sending, which has begun with the rest."""
        own = transfer(self.path, self.store, self.running, journal=self.path.parent.with_suffix(".own"))
        own.journal.take_over(self.before_marker.journal, [found(self.path)])
        own.add([found(self.path)], awaited=self.before_marker.parts_in_flight)
        self.stream.reorder([own])
        return own

    async def arrives(self, own: FileTransfer) -> None:
        self.store.reached.set()
        await self.before_marker.settle(own)
        self.before_marker.journal.close()
        self.stream.pump()


@asynccontextmanager
async def parts_in_flight(folder: Path, store: DistantStore) -> AsyncIterator[Early]:
    path = written(folder / "checkpoint-1", parts=PARTS)
    with executor(concurrency=3) as running:
        early, stream = transfer(path, store, running, journal=folder / "early", growing=True), Dispatcher(running)
        early.add([found(path)])
        stream.reorder([early])
        while len(store.came) < 3:
            await asyncio.sleep(0.01)
        early.close()
        yield Early(path, store, running, stream, Handover(early.journal, early, await early.wait_for_parts()))


async def test_each_part_is_sent_once_and_the_file_is_joined_when_the_last_has_arrived(tmp_path: Path) -> None:
    store = DistantStore()
    async with parts_in_flight(tmp_path, store) as early:
        assert early.before_marker.parts_in_flight == {"model": {1, 2, 3}}
        own = early.after_marker()
        await early.arrives(own)
        await ended(own)
        assert Counter(store.came) == Counter(range(1, PARTS + 1))
        assert store.get("checkpoint-1/model") == early.path.read_bytes()


async def test_a_part_that_is_another_in_the_end_is_sent_again(tmp_path: Path) -> None:
    store = DistantStore()
    async with parts_in_flight(tmp_path, store) as early:
        with early.path.open("r+b") as file:
            file.seek(PART_BYTES)
            file.write(b"patched")
        early.before_marker.journal.stamps["model"] = found(early.path).growing_stamp
        own = early.after_marker()
        await early.arrives(own)
        await ended(own)
        assert Counter(store.came) == Counter([*range(1, PARTS + 1), 2])
        assert store.get("checkpoint-1/model") == early.path.read_bytes()


async def test_what_did_not_arrive_is_sent_again(tmp_path: Path) -> None:
    store = RefusingStore()
    async with parts_in_flight(tmp_path, store) as early:
        own = early.after_marker()
        await early.arrives(own)
        await ended(own)
        assert store.get("checkpoint-1/model") == early.path.read_bytes()


class WatchedStore(MemoryStore):
    """Records what is shown as sent when a part comes."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[int] = []
        self.figure: Callable[[], int] = lambda: 0

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> Part:
        self.shown.append(self.figure())
        return super().upload_part(key, upload_id, number, body)


async def test_what_is_sent_again_is_not_shown_as_sent(tmp_path: Path) -> None:
    """Parts counted twice: 101 % was shown, and later 100 % while everything was sent again."""
    store, path = WatchedStore(), written(tmp_path / "checkpoint-1", parts=PARTS)
    with executor(concurrency=1) as running:
        early, stream = transfer(path, store, running, journal=tmp_path / "early"), Dispatcher(running)
        early.add([found(path)])
        stream.reorder([early])
        await ended(early)
        before, store.shown = path.stat(), []
        path.write_bytes(path.read_bytes()[::-1])
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        context = uploads(store, running)
        tracked = context.catalog.finished(finished(name="checkpoint-1", files=(found(path),)), held=True)
        store.figure = lambda: tracked.sent_bytes
        source, journal = Unfinished(Folder(tmp_path) / "checkpoint-1"), Journal(Folder(tmp_path) / "checkpoint-1@own")
        source.see(found(path))
        journal.take_over(early.journal, [found(path)])
        own = context.transfer("checkpoint-1", source, journal, guard=OpenGuard(), on_wrong=store.shown.clear, tracked=tracked)
        report_uploading(context.catalog, tracked, own)
        assert tracked.sent_bytes == PARTS * PART_BYTES
        own.add([found(path)])
        stream.reorder([own])
        await ended(own)
        assert store.shown == [number * PART_BYTES for number in range(PARTS)]
        assert tracked.sent_bytes == PARTS * PART_BYTES
        assert store.get("checkpoint-1/model") == path.read_bytes()


def test_no_more_than_its_size_is_shown_as_sent() -> None:
    tracked = Tracked("checkpoint-1", "v", State.FINISHED, finished(files=(FoundFile("model", 100, 0, 0),)))
    assert [tracked.set_sent_bytes(sent) for sent in (0, 99, 101)] == [0, 99, 100]
    assert tracked.sent_bytes == 100
