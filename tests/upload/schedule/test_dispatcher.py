"""The order in which work items are sent, with threads and a store in memory."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from sidecar.core.schedule.slow_parts import SEEN_S
from sidecar.errors import PartRefused
from sidecar.store.protocol import Part
from sidecar.store.slice import FileSlice
from sidecar.transfer.executor import StoreExecutor
from sidecar.upload.schedule import dispatcher
from sidecar.upload.schedule.dispatcher import Dispatcher
from sidecar.upload.send.file_transfer import FileTransfer
from tests.store.memory import MemoryStore
from tests.upload.parts import PART_BYTES, DistantStore, ended, executor, found, transfer, written


def begun(folder: Path, store: MemoryStore, running: StoreExecutor, *, parts: int) -> FileTransfer:
    path = written(folder, parts=parts)
    made = transfer(path, store, running, journal=folder.with_suffix(".jsonl"))
    made.add([found(path)])
    return made


async def test_while_answers_are_on_their_way_the_next_parts_leave(tmp_path: Path) -> None:
    store = DistantStore(enough=7)
    with executor(concurrency=8) as running:
        assert running.adapted.limit < 7
        stream, one = Dispatcher(running), begun(tmp_path / "checkpoint-1", store, running, parts=10)
        stream.reorder([one])
        await ended(one)
    assert len(store.get("checkpoint-1/model")) == 10 * PART_BYTES


async def test_no_more_requests_than_are_allowed_wait_for_answers(tmp_path: Path) -> None:
    store = DistantStore()
    with executor(concurrency=3) as running:
        stream, one = Dispatcher(running), begun(tmp_path / "checkpoint-1", store, running, parts=10)
        stream.reorder([one])
        while len(store.came) < 3:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert len(store.came) == 3
        store.reached.set()
        await ended(one)


async def test_how_large_parts_are_depends_on_the_way_to_the_store_unless_it_is_set() -> None:
    gib = 1 << 30
    with executor(concurrency=4, part_bytes=None) as running:
        assert running.part_bytes(gib) == 16 << 20, "nothing is known"
        running.set_round_trip(0.001)
        assert running.part_bytes(gib) == 64 << 20
        running.gate.limit(100 << 20)
        assert running.part_bytes(gib) == 25 << 20, "a quarter of a second"
        running.gate.limit(None)
        running.set_round_trip(0.03)
        assert running.part_bytes(gib) == 16 << 20
    with executor(concurrency=4, part_bytes=5 << 20) as running:
        running.set_round_trip(0.001)
        assert running.part_bytes(gib) == 5 << 20


class StuckGate:
    """Lets nothing of one checkpoint through."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def pass_through(self, size_bytes: int) -> None:
        assert self.opened.wait(20)


@pytest.mark.parametrize("strictly", [True, False])
async def test_strictly_in_order_nothing_begins_before_the_one_before_is_through(tmp_path: Path, strictly: bool) -> None:
    store = MemoryStore()
    with executor(concurrency=8) as running:
        first = begun(tmp_path / "checkpoint-2", store, running, parts=1)
        second = begun(tmp_path / "checkpoint-1", store, running, parts=2)
        gate = StuckGate()
        first._payloads.gate = gate
        stream = Dispatcher(running)
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


async def test_the_next_one_waits_for_last_parts_in_flight_unless_they_are_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "BLOCK_BYTES", 1)  # the rate is known after SEEN_S
    store = MemoryStore()
    with executor(concurrency=8) as running:
        first = begun(tmp_path / "checkpoint-1", store, running, parts=2)
        newer = begun(tmp_path / "checkpoint-2", store, running, parts=2)
        gate = StuckGate()
        first._payloads.gate = gate
        running.sent.add(5 << 20, began_s=0, now_s=(5 << 20) / 1000)
        stream = Dispatcher(running)
        stream.reorder([first])
        stream.reorder([newer, first])
        await asyncio.sleep(SEEN_S / 3)
        assert (first.in_flight, newer.in_flight) == (2, 0)
        await ended(newer)
        assert first.in_flight == 2
        gate.opened.set()
        await ended(first)


async def test_a_part_that_the_store_refuses_ends_an_upload_that_others_precede(tmp_path: Path) -> None:
    """The part was sent again in a new multipart upload, without the parts before it: the upload had no end."""

    class RefusingOnce(MemoryStore):
        is_refused = False

        def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> Part:
            if number == 4 and not self.is_refused:
                self.is_refused = True
                raise PartRefused(key, "InvalidArgument")
            return super().upload_part(key, upload_id, number, body)

    with executor(concurrency=1) as running:
        stream, one = Dispatcher(running), begun(tmp_path / "checkpoint-1", RefusingOnce(), running, parts=4)
        stream.reorder([one])
        one.retry_gate.put(behind=True)
        with pytest.raises(PartRefused):
            async with asyncio.timeout(dispatcher.PREEMPTED_RETRY_S + 5):
                await one.finished()
        assert one.journal.uploads == {}
        one.journal.close()
