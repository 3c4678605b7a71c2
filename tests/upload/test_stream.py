"""The order in which pieces leave, with threads and a store in memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sidecar.core.local import FoundFile
from sidecar.store.memory import MemoryStore
from sidecar.store.protocol import Part
from sidecar.store.slice import FileSlice
from sidecar.transfer import Health, RateGate, Transfers
from sidecar.upload.bodies import Bodies
from sidecar.upload.journal import Journal
from sidecar.upload.sending import Sending
from sidecar.upload.stream import Stream
from sidecar.upload.unchanged import Unchanged
from sidecar.volume.unfinished import Unfinished

PART_BYTES = 1000


class DistantStore(MemoryStore):
    """Takes each part at once, and answers when ``reached`` is set or so many parts have come."""

    def __init__(self, enough: int = 10**9) -> None:
        super().__init__()
        self.came: list[str] = []
        self.reached = threading.Event()
        self._enough = enough

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> Part:
        part = super().upload_part(key, upload_id, number, body)
        self.came.append(key)
        if len(self.came) >= self._enough:
            self.reached.set()
        assert self.reached.wait(20), f"only {len(self.came)} parts came before the first answer"
        return part


@contextmanager
def transfers(*, concurrency: int) -> Iterator[Transfers]:
    running = Transfers(concurrency=concurrency, gate=RateGate(None), health=Health())
    try:
        yield running
    finally:
        running.close()


def sending(name: str, store: MemoryStore, with_transfers: Transfers, folder: Path, *, parts: int) -> Sending:
    source = Unfinished(folder / name)
    (folder / name).mkdir()
    path = folder / name / "model"
    path.write_bytes(bytes(parts * PART_BYTES))
    status = path.stat()
    file = FoundFile("model", status.st_size, status.st_mtime_ns, status.st_ino)
    source.see(file)

    async def fence() -> None:
        return

    made = Sending(
        name=name,
        bodies=Bodies(name=name, source=source, store=store, capabilities=store.probe(), gate=with_transfers.gate),
        store=store,
        capabilities=store.probe(),
        transfers=with_transfers,
        journal=Journal(folder / f"{name}.jsonl"),
        part_bytes=PART_BYTES,
        unchanged=Unchanged(),
        fence=fence,
    )
    made.add([file])
    return made


async def ended(one: Sending) -> None:
    await one.finished()
    one.journal.close()


async def test_while_answers_are_on_their_way_the_next_parts_leave(tmp_path: Path) -> None:
    store = DistantStore(enough=7)
    with transfers(concurrency=8) as running:
        assert running.adapted.limit < 7
        stream, one = Stream(running), sending("checkpoint-1", store, running, tmp_path, parts=10)
        stream.reorder([one])
        await ended(one)
    assert len(store.get("checkpoint-1/model")) == 10 * PART_BYTES


async def test_no_more_requests_than_are_allowed_wait_for_answers(tmp_path: Path) -> None:
    store = DistantStore()
    with transfers(concurrency=3) as running:
        stream, one = Stream(running), sending("checkpoint-1", store, running, tmp_path, parts=10)
        stream.reorder([one])
        while len(store.came) < 3:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert len(store.came) == 3
        store.reached.set()
        await ended(one)


class StuckGate:
    """Lets nothing of one checkpoint through."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def pass_through(self, size_bytes: int) -> None:
        assert self.opened.wait(20)


@pytest.mark.parametrize("strictly", [True, False])
async def test_strictly_in_order_nothing_begins_before_the_one_before_is_through(tmp_path: Path, strictly: bool) -> None:
    store = MemoryStore()
    with transfers(concurrency=8) as running:
        first = sending("checkpoint-2", store, running, tmp_path, parts=1)
        second = sending("checkpoint-1", store, running, tmp_path, parts=2)
        gate = StuckGate()
        first._bodies._gate = gate
        stream = Stream(running)
        stream.reorder([first, second], strictly=strictly)
        if strictly:
            await asyncio.sleep(0.1)
            assert (first.in_flight, second.in_flight) == (1, 0)
        else:
            await second.finished()
            assert first.in_flight == 1
        gate.opened.set()
        await ended(first)
        await ended(second)
