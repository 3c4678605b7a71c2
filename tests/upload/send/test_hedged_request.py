"""The last part is not as slow as the connection it happened to get."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

from sidecar.catalog.events import Events
from sidecar.errors import AccessRefused, Stopped, StoreUnavailable
from sidecar.store.protocol import Part
from sidecar.store.slice import FileSlice
from sidecar.transfer.health import Health
from sidecar.transfer.rate_gate import PauseGate
from sidecar.upload.schedule.dispatcher import Dispatcher
from tests.store.memory import MemoryStore
from tests.upload.parts import PART_BYTES, ended, executor, found, transfer, written

PARTS = 3
SLOW_READ_BYTES = 10


class OneSlowConnection(MemoryStore):
    """The first try of the last part gets through a few bytes, and then nothing until ``goes_on``."""

    def __init__(self, *, answers: bool = True, first_fails: bool = False, second_fails: bool = False) -> None:
        super().__init__()
        self.goes_on = threading.Event()
        self.tries = 0
        self.troubles: list[str] = []
        self.came: list[bytes] = []
        self.ended: list[BaseException | None] = []
        self._first_fails = first_fails
        self._second_fails = second_fails
        self._answers = answers

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> Part:
        if number < PARTS:
            time.sleep(0.05)  # so that the rate of the link is known
            return super().upload_part(key, upload_id, number, body)
        self.tries += 1
        return self._first(key, upload_id, number, body) if self.tries == 1 else self._second(key, upload_id, number, body)

    def _first(self, key: str, upload_id: str, number: int, body: FileSlice) -> Part:
        try:
            body.seek(0)
            body.readinto(memoryview(bytearray(SLOW_READ_BYTES)))
            if not self._answers:  # all bytes leave, and the answer takes long
                part = super().upload_part(key, upload_id, number, body)
            assert self.goes_on.wait(20)
            if self._first_fails:
                raise AccessRefused("the credentials expired")
            if self._answers:
                part = super().upload_part(key, upload_id, number, body)
        except BaseException as error:
            self.ended.append(error)
            raise
        self.ended.append(None)
        return part

    def _second(self, key: str, upload_id: str, number: int, body: FileSlice) -> Part:
        if self._second_fails and self.tries == 2:
            self.goes_on.set()
            raise StoreUnavailable("the second try has no luck")
        return super().upload_part(key, upload_id, number, body)


async def sent(folder: Path, store: OneSlowConnection, *, concurrency: int = 4) -> float:
    """Send a file and return how long it took."""
    path = written(folder / "checkpoint-1", parts=PARTS)
    with executor(concurrency=concurrency) as running:
        running.health = Health((events := Events()).happened)
        stream, one = Dispatcher(running), transfer(path, store, running, journal=folder / "journal")
        one.add([found(path)])
        began_s = time.monotonic()
        # A link that is known to be fast: what was measured of three tiny parts says nothing.
        running.sent.add(1 << 30, began_s=began_s - 1, now_s=began_s)
        stream.reorder([one])
        await ended(one)
        took_s = time.monotonic() - began_s
        store.goes_on.set()
        await asyncio.sleep(0.2)
    store.troubles = [event.name for event in events.after(0)]
    return took_s


async def first_end(store: OneSlowConnection) -> BaseException | None:
    """Wait until the request that lost has ended, in its own thread, and return how."""
    while not store.ended:
        await asyncio.sleep(0.01)
    return store.ended[0]


async def test_a_part_on_a_connection_that_stands_still_is_sent_on_another(tmp_path: Path) -> None:
    store = OneSlowConnection()
    assert await sent(tmp_path, store) < 10
    assert store.tries == 2
    assert len(store.get("checkpoint-1/model")) == PARTS * PART_BYTES
    assert isinstance(await first_end(store), Stopped), "the slow one went on after the other had arrived"


async def test_what_becomes_of_the_one_that_lost_is_no_trouble_of_the_store(tmp_path: Path) -> None:
    store = OneSlowConnection(first_fails=True)
    await sent(tmp_path, store)
    assert isinstance(await first_end(store), AccessRefused)
    assert store.tries == 2
    assert not store.troubles


async def test_no_more_requests_than_are_allowed_for_a_second_try(tmp_path: Path) -> None:
    store = OneSlowConnection()
    threading.Timer(1.5, store.goes_on.set).start()
    await sent(tmp_path, store, concurrency=1)
    assert store.tries == 1


async def test_a_second_try_that_fails_leaves_the_first_alone(tmp_path: Path) -> None:
    store = OneSlowConnection(second_fails=True)
    await sent(tmp_path, store)
    assert len(store.get("checkpoint-1/model")) == PARTS * PART_BYTES


async def test_what_only_waits_for_its_answer_is_not_sent_again(tmp_path: Path) -> None:
    store = OneSlowConnection(answers=False)
    threading.Timer(1.5, store.goes_on.set).start()
    await sent(tmp_path, store)
    assert store.tries == 1
    assert store.ended == [None]


async def test_what_was_held_is_not_taken_for_slow(tmp_path: Path) -> None:
    """Its last part waits while something newer goes first, and goes on when it is its turn again."""
    with executor(concurrency=4) as running:
        running.sent.add(1 << 30, began_s=time.monotonic() - 1, now_s=time.monotonic())
        running.set_round_trip(1.0)
        assert running.adapted.limit >= PARTS
        store, pause_gate = OneSlowConnection(), PauseGate(running.gate)
        path = written(tmp_path / "checkpoint-1", parts=PARTS)
        stream, older = Dispatcher(running), transfer(path, store, running, journal=tmp_path / "older")
        older._payloads.gate = pause_gate
        newer_path = written(tmp_path / "checkpoint-2", parts=1)
        newer = transfer(newer_path, MemoryStore(), running, journal=tmp_path / "newer")
        pause_gate.set_paused(True)
        older.add([found(path)])
        stream.reorder([older])
        await asyncio.sleep(0.15)  # it was looked at
        stream.reorder([newer, older])
        await asyncio.sleep(1.0)
        stream.reorder([older])
        pause_gate.set_paused(False)
        threading.Timer(0.2, store.goes_on.set).start()
        await ended(older)
        newer.journal.close()
    assert store.tries == 1
