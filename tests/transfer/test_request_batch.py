"""What one thread carries, several under way: nothing is lost, whatever fails."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.format.checksum import text_of
from sidecar.core.format.manifest import FileEntry
from sidecar.core.schedule.concurrency import SmallRequests
from sidecar.download.range_fetcher import RangeFetcher
from sidecar.errors import CorruptObject, NotFound, StoreUnavailable
from sidecar.store.protocol import Readable, Stored
from sidecar.store.slice import FileSlice
from sidecar.transfer.executor import StoreExecutor
from sidecar.transfer.request_batch import RequestBatch
from sidecar.upload.schedule.dispatcher import Dispatcher
from sidecar.upload.send.deduplicate import Deduplicator
from sidecar.upload.send.file_transfer import FileTransfer
from sidecar.upload.send.journal import Journal
from sidecar.upload.send.payloads import Payloads
from sidecar.upload.send.store_link import StoreLink
from sidecar.volume.opener import Folder
from sidecar.volume.unfinished import Unfinished
from tests.store.memory import MemoryStore
from tests.upload.parts import OpenGuard, ended, executor, found

FILES = 40


class Broken(Exception):
    pass


class Requests:
    """Numbered requests; some fail, once, when they are sent, when they are answered or when they end."""

    def __init__(self, failing: dict[int, str]) -> None:
        self.failing = dict(failing)
        self.open: list[int] = []
        self.most_open = 0
        self.ended: list[int] = []

    def _fail(self, number: int, where: str) -> None:
        if self.failing.get(number) == where:
            del self.failing[number]
            raise Broken

    @contextmanager
    def begin(self, number: int) -> Iterator[Callable[[], int]]:
        self._fail(number, "sent")
        self.open.append(number)
        self.most_open = max(self.most_open, len(self.open))

        def answered() -> int:
            self._fail(number, "answered")
            return -number

        try:
            yield answered
            self._fail(number, "closed")
        finally:
            self.open.remove(number)

    def end(self, number: int, result: int) -> None:
        assert number not in self.open
        assert result == -number
        self._fail(number, "ended")
        self.ended.append(number)


@given(
    count=st.integers(0, 12),
    taken=st.integers(0, 3),
    at_once=st.integers(1, 5),
    failing=st.dictionaries(st.integers(0, 14), st.sampled_from(["sent", "answered", "closed", "ended"])),
)
def test_each_request_ends_once_and_in_order_whatever_fails_in_between(
    count: int, taken: int, at_once: int, failing: dict[int, str]
) -> None:
    requests, more = Requests(failing), deque(range(taken, taken + count))

    def turn_with(taken: range = range(0)) -> RequestBatch[int]:
        return RequestBatch(lambda: more.popleft() if more else None, at_once=at_once, taken=taken)

    turn = turn_with(range(taken))
    while turn.left or more:
        try:
            turn.run(requests.begin, requests.end)
            turn = turn_with()  # the moment was over
        except Broken:
            assert requests.open == []
            assert [*requests.ended, *turn.left, *more] == list(range(taken + count)), "none is lost, none is twice"
    assert requests.ended == list(range(taken + count))
    assert requests.most_open <= at_once


def test_after_an_error_no_more_is_taken() -> None:
    requests, more = Requests({1: "answered"}), deque(range(20))
    turn = RequestBatch(more.popleft, at_once=3)
    with pytest.raises(Broken):
        turn.run(requests.begin, requests.end)
    assert list(turn.left) == [1, 2, 3]
    turn.run(requests.begin, requests.end)
    assert requests.ended == [0, 1, 2, 3]
    assert more[0] == 4


class HangingStore(MemoryStore):
    """Does not answer for one object until it is let go, and cannot be reached for another, once."""

    def __init__(self, *, hangs: str = "", fails: str = "") -> None:
        super().__init__()
        self.let_go = threading.Event()
        self._hangs, self._fails = hangs, fails

    def _wait(self, key: str) -> None:
        if self._hangs and key.endswith(self._hangs):
            assert self.let_go.wait(20)
        if self._fails and key.endswith(self._fails):
            self._fails = ""
            raise StoreUnavailable(key)

    @contextmanager
    def putting_file(self, key: str, body: FileSlice, *, only_if_absent: bool = False) -> Iterator[Callable[[], Stored]]:
        def answered() -> Stored:
            self._wait(key)
            return self.put_file(key, body, only_if_absent=only_if_absent)

        yield answered

    @contextmanager
    def reading(self, key: str, *, length: int) -> Iterator[Callable[[], Readable]]:
        with super().reading(key, length=length) as opened:

            def answered() -> Readable:
                self._wait(key)
                return opened()

            yield answered


@pytest.fixture
def near() -> Iterator[StoreExecutor]:
    """To a store that answers at once, as a rule."""
    with executor(concurrency=8) as running:
        running.small = SmallRequests(1, 4)
        yield running


def small_files(folder: Path, store: MemoryStore, running: StoreExecutor) -> FileTransfer:
    folder.mkdir()
    source, files = Unfinished(Folder(folder.parent) / folder.name), []
    for number in range(FILES):
        (folder / f"file-{number:02}").write_bytes(b"%d" % number * number)
        files.append(found(folder / f"file-{number:02}"))
        source.see(files[-1])

    made = FileTransfer(
        folder.name,
        StoreLink(store, store.probe(), running, Deduplicator()),
        payloads=Payloads(name=folder.name, source=source, store=store, capabilities=store.probe(), gate=running.gate),
        journal=Journal(Folder(folder.parent) / f"{folder.name}@j.jsonl"),
        guard=OpenGuard(),
    )
    made.add(files)
    return made


def contents(store: MemoryStore, name: str) -> list[bytes]:
    return [store.get(f"{name}/file-{number:02}") for number in range(FILES)]


WANTED = [b"%d" % number * number for number in range(FILES)]


async def test_a_small_file_whose_answer_does_not_come_holds_up_no_others_but_those_behind_it(
    tmp_path: Path, near: StoreExecutor
) -> None:
    store = HangingStore(hangs="file-07")
    stream, one = Dispatcher(near), small_files(tmp_path / "checkpoint-1", store, near)
    stream.reorder([one])
    while len(one.journal.entries) < FILES - 4:
        await asyncio.sleep(0.01)
    store.let_go.set()
    await ended(one)
    assert contents(store, "checkpoint-1") == WANTED


async def test_small_files_that_fail_are_tried_again_with_those_that_were_under_way(
    tmp_path: Path, near: StoreExecutor
) -> None:
    store = HangingStore(fails="file-07")
    stream, one = Dispatcher(near), small_files(tmp_path / "checkpoint-1", store, near)
    stream.reorder([one])
    await ended(one)
    assert contents(store, "checkpoint-1") == WANTED


@pytest.mark.slow
async def test_small_files_that_fail_while_something_else_goes_first_are_put_back(tmp_path: Path, near: StoreExecutor) -> None:
    store = HangingStore(hangs="file-07", fails="file-07")
    stream = Dispatcher(near)
    old, new = (small_files(tmp_path / f"checkpoint-{step}", store, near) for step in (1, 2))
    stream.reorder([old])
    while len(old.journal.entries) < 7:
        await asyncio.sleep(0.01)
    stream.reorder([new, old])
    store.let_go.set()
    await asyncio.gather(ended(new), ended(old))
    assert contents(store, "checkpoint-1") == contents(store, "checkpoint-2") == WANTED


def stored(store: MemoryStore, number: int, content: bytes) -> FileEntry:
    """Put a small file into the store, and return what a manifest says of it."""
    key = f"checkpoint-1/file-{number:02}"
    store.put(key, content)
    crc = text_of(content)
    return FileEntry(path=key.rpartition("/")[2], key=key, size_bytes=len(content), crc64nvme=crc, etag="e", part_bytes=0)


async def test_a_small_file_that_does_not_come_holds_up_no_others_but_those_behind_it(
    tmp_path: Path, near: StoreExecutor
) -> None:
    store = HangingStore(hangs="file-07", fails="file-20")
    entries = [stored(store, number, content) for number, content in enumerate(WANTED)]
    done_bytes: list[int] = []
    place, fetching = (
        tmp_path / "checkpoint-1",
        RangeFetcher(store, near, Folder(tmp_path) / "partial", done_bytes.append, undamaged),
    )
    fetches = asyncio.create_task(fetching.fetch(entries, Folder(tmp_path) / "checkpoint-1"))
    while not place.is_dir() or len(list(place.iterdir())) < FILES - 4:
        await asyncio.sleep(0.01)
    store.let_go.set()
    await fetches
    assert [(place / entry.path).read_bytes() for entry in entries] == WANTED
    assert sum(done_bytes) == sum(map(len, WANTED))


class SlowStore(MemoryStore):
    """Answers each request after a while, and counts those under way."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._under_way = 0
        self.most = 0

    def _count(self, change: int) -> None:
        with self._lock:
            self._under_way += change
            self.most = max(self.most, self._under_way)

    @contextmanager
    def reading(self, key: str, *, length: int) -> Iterator[Callable[[], Readable]]:
        self._count(1)
        try:
            with super().reading(key, length=length) as opened:

                def answered() -> Readable:
                    time.sleep(0.08)
                    return opened()

                yield answered
        finally:
            self._count(-1)


async def undamaged(entry: FileEntry, error: CorruptObject | NotFound) -> None:
    raise error


@pytest.mark.slow
async def test_a_slow_store_is_asked_for_no_more_at_once_than_is_allowed(tmp_path: Path, near: StoreExecutor) -> None:
    store = SlowStore()
    entries = [stored(store, number, b"%d" % number) for number in range(4 * FILES)]
    fetching = RangeFetcher(store, near, Folder(tmp_path) / "partial", lambda _: None, undamaged)
    fetches = asyncio.create_task(fetching.fetch(entries, Folder(tmp_path) / "checkpoint-1"))
    most_tasks = 0
    while not fetches.done():
        most_tasks = max(most_tasks, len(asyncio.all_tasks()))
        await asyncio.sleep(0.02)
    await fetches
    assert near.small.at_once < store.most <= near.most
    assert most_tasks < 2 * near.most
