"""A file is sent on the condition that its key has no object: a refusal ends well, and costs little."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sidecar.core.schedule.concurrency import SmallRequests
from sidecar.errors import AlreadyExists, Fenced, StoreUnavailable
from sidecar.store.protocol import Capabilities, Stored, Verification
from sidecar.store.slice import FileSlice
from sidecar.transfer.executor import StoreExecutor
from sidecar.upload.schedule.dispatcher import Dispatcher
from sidecar.upload.send.deduplicate import Deduplicator
from sidecar.upload.send.file_transfer import FileTransfer
from sidecar.upload.send.journal import Journal
from sidecar.upload.send.payloads import Payloads
from sidecar.upload.send.store_link import SharedPaths, StoreLink
from sidecar.upload.send.work_item import SMALL_BYTES
from sidecar.volume.opener import Folder
from sidecar.volume.unfinished import Unfinished
from tests.store.memory import MemoryStore
from tests.upload.parts import executor, found

NAME = "checkpoint-1"
FILES = 20
AT_ONCE = 4


class CountingStore(MemoryStore):
    """Counts bodies; some answers are lost, and some requests of another pod come between."""

    def __init__(self, *, can: bool = True, reads_back: bool = False) -> None:
        super().__init__()
        self.sent: Counter[tuple[str, bool]] = Counter()
        """By key, and whether the store was to refuse it if it has an object."""
        self.listings, self.listed = 0, threading.Event()
        self.lost: set[str] = set()
        """Keys whose next answer is lost, after the fact."""
        self.damaged: set[str] = set()
        """Keys whose next body arrives as another one."""
        self.before: Callable[[str], None] = lambda _: None
        """Called with the key of each body before it arrives."""
        self._can, self._reads_back = can, reads_back

    def probe(self) -> Capabilities:
        verification = Verification.READ_BACK if self._reads_back else Verification.STORE_CRC
        return Capabilities(verification, True, min_part_bytes=1, max_parts=10_000, conditional_files=self._can)

    def list(self, prefix: str) -> Iterator[Stored]:
        found = super().list(prefix)
        self.listings += 1
        self.listed.set()
        return found

    def put_file(self, key: str, body: FileSlice, *, only_if_absent: bool = False) -> Stored:
        self.before(key)
        self.sent[key, only_if_absent] += 1
        stored = super().put_file(key, body, only_if_absent=only_if_absent)
        if key in self.damaged:
            self.damaged.discard(key)
            return self.put(key, b"damaged")
        if key in self.lost:
            self.lost.discard(key)
            raise StoreUnavailable("no answer")
        return stored

    @contextmanager
    def putting_file(self, key: str, body: FileSlice, *, only_if_absent: bool = False) -> Iterator[Callable[[], Stored]]:
        yield lambda: self.put_file(key, body, only_if_absent=only_if_absent)

    def bodies(self) -> int:
        return sum(self.sent.values())


class CountingGuard:
    """Lets all pass until ``error`` is set."""

    def __init__(self) -> None:
        self.asked = 0
        self.error: Exception | None = None

    async def pass_through(self, *, asks_now: bool = False) -> None:
        self.asked += asks_now
        if asks_now and self.error is not None:
            raise self.error


class Upload:
    """Upload of one checkpoint: small files, and one that is not."""

    def __init__(
        self,
        folder: Path,
        store: CountingStore,
        running: StoreExecutor,
        *,
        more_large: int = 0,
        shared: SharedPaths | None = None,
    ) -> None:
        self.store, self.guard = store, CountingGuard()
        self.contents = {f"file-{number:02}": b"%d" % number * number for number in range(FILES)}
        self.contents |= {f"large{number or ''}": bytes(SMALL_BYTES + 1 + number) for number in range(1 + more_large)}
        (folder / NAME).mkdir()
        source, files = Unfinished(Folder(folder) / NAME), []
        for path, content in self.contents.items():
            (folder / NAME / path).write_bytes(content)
            files.append(found(folder / NAME / path))
            source.see(files[-1])
        self.journal = Journal(Folder(folder) / f"{NAME}@j.jsonl")
        self.transfer = FileTransfer(
            NAME,
            StoreLink(store, store.probe(), running, Deduplicator(), shared or SharedPaths()),
            payloads=Payloads(name=NAME, source=source, store=store, capabilities=store.probe(), gate=running.gate),
            journal=self.journal,
            guard=self.guard,
        )
        self.transfer.add(files)
        self._dispatcher = Dispatcher(running)

    @property
    def keys(self) -> list[str]:
        return [f"{NAME}/{path}" for path in self.contents]

    async def sent(self) -> None:
        """Send all files; the store and the journal hold them afterwards."""
        try:
            self._dispatcher.reorder([self.transfer])
            entries = await asyncio.wait_for(self.transfer.finished(), 20)
        finally:
            self.journal.close()
        assert {entry.key: entry.etag for entry in entries} == {key: self.store.stat(key).etag for key in self.keys}
        assert self.held() == self.contents

    def held(self) -> dict[str, bytes]:
        return {path: self.store.get(f"{NAME}/{path}") for path in self.contents}


@pytest.fixture
def running() -> Iterator[StoreExecutor]:
    with executor(concurrency=8, part_bytes=64 << 20) as threads:
        threads.small = SmallRequests(1, AT_ONCE)
        yield threads


async def test_files_of_a_new_step_are_sent_once_each_and_replace_nothing(tmp_path: Path, running: StoreExecutor) -> None:
    upload = Upload(tmp_path, CountingStore(), running)
    await upload.sent()
    assert upload.store.sent == Counter((key, True) for key in upload.keys)
    assert (upload.store.listings, upload.guard.asked) == (0, 0)


async def test_after_the_first_refusals_the_left_overs_of_an_earlier_pod_are_replaced_without_a_try(
    tmp_path: Path, running: StoreExecutor
) -> None:
    upload = Upload(tmp_path, CountingStore(), running)
    for key in upload.keys:
        upload.store.put(key, b"of an earlier pod")
    await upload.sent()
    assert upload.guard.asked > 0
    assert upload.store.listings == 1
    # One thread that is late is followed by another, which begins with as many.
    assert upload.store.bodies() <= len(upload.keys) + 2 * AT_ONCE + 2, "objects in the listing are not tried first"
    assert all(upload.store.sent[key, False] == 1 for key in upload.keys)


async def test_a_refusal_that_comes_after_the_listing_is_no_error(tmp_path: Path, running: StoreExecutor) -> None:
    store = CountingStore()
    upload = Upload(tmp_path, store, running, more_large=1)
    first, second = large = [f"{NAME}/large", f"{NAME}/large1"]
    for key in large:
        store.put(key, b"of an earlier pod")
    second_came = threading.Event()

    def second_comes_first_and_is_refused_last(key: str) -> None:
        if key == first:
            assert second_came.wait(20)
        elif key == second and not second_came.is_set():
            second_came.set()
            assert store.listed.wait(20)

    store.before = second_comes_first_and_is_refused_last
    await upload.sent()
    assert [(store.sent[key, True], store.sent[key, False]) for key in large] == [(1, 1), (1, 1)]


async def test_a_path_that_other_nodes_write_too_is_refused_in_one_checkpoint_only(
    tmp_path: Path, running: StoreExecutor
) -> None:
    shared, written = SharedPaths(has_other_nodes=True), {"file-07", "file-08", "large"}
    for number, tries in enumerate((1, 0, 0)):
        (tmp_path / str(number)).mkdir()
        upload = Upload(tmp_path / str(number), store := CountingStore(), running, shared=shared)
        for path in written:
            store.put(f"{NAME}/{path}", b"of another node")
        await upload.sent()
        assert {path: store.sent[f"{NAME}/{path}", True] for path in written} == dict.fromkeys(written, tries)
        assert store.bodies() == len(upload.keys) + len(written) * tries
        assert store.listings == 0, "a step of many nodes has many objects"
    assert shared.paths == written


async def test_keys_that_are_known_to_be_taken_are_sent_once_each(tmp_path: Path, running: StoreExecutor) -> None:
    upload = Upload(tmp_path, CountingStore(), running)
    for key in upload.keys:
        upload.store.put(key, b"of an earlier save")
    upload.journal.taken.update(upload.keys)
    await upload.sent()
    assert upload.store.sent == Counter((key, False) for key in upload.keys)


async def test_a_store_without_conditional_writes_is_not_asked_for_any(tmp_path: Path, running: StoreExecutor) -> None:
    upload = Upload(tmp_path, CountingStore(can=False), running)
    upload.store.put(upload.keys[0], b"of an earlier pod")
    await upload.sent()
    assert upload.store.sent == Counter((key, False) for key in upload.keys)


@pytest.mark.parametrize("path", ["file-07", "large"])
async def test_after_a_lost_answer_our_own_object_is_no_error(tmp_path: Path, running: StoreExecutor, path: str) -> None:
    upload = Upload(tmp_path, CountingStore(), running)
    upload.store.lost = {key := f"{NAME}/{path}"}
    await upload.sent()
    assert (upload.store.sent[key, True], upload.store.sent[key, False]) == (2, 1)
    assert (upload.store.listings, upload.guard.asked) == (0, 0), "nobody else wrote it"


@pytest.mark.parametrize("path", ["file-07", "large"])
async def test_an_object_that_arrived_damaged_is_replaced(tmp_path: Path, running: StoreExecutor, path: str) -> None:
    upload = Upload(tmp_path, CountingStore(reads_back=True), running)
    upload.store.damaged = {key := f"{NAME}/{path}"}
    await upload.sent()
    assert upload.store.sent[key, False] == 1


@pytest.mark.parametrize("path", ["file-07", "large"])
async def test_what_a_later_pod_wrote_meanwhile_stays(tmp_path: Path, running: StoreExecutor, path: str) -> None:
    upload = Upload(tmp_path, CountingStore(), running)
    key = f"{NAME}/{path}"

    def comes_between(arriving: str) -> None:
        if arriving == key:
            upload.store.put(key, b"of a later pod")
            upload.guard.error = Fenced("a later pod")

    upload.store.before = comes_between
    with pytest.raises(Fenced):
        await upload.sent()
    assert upload.store.get(key) == b"of a later pod"
    assert upload.store.sent[key, False] == 0


async def test_a_refusal_of_what_was_sent_without_a_condition_is_an_error(tmp_path: Path, running: StoreExecutor) -> None:
    upload = Upload(tmp_path, CountingStore(can=False), running)

    def refuses(key: str) -> None:
        raise AlreadyExists(key)

    upload.store.before = refuses
    with pytest.raises(AlreadyExists):
        await upload.sent()


@pytest.mark.parametrize("path", ["file-07", "large"])
async def test_an_object_recorded_and_dropped_is_replaced_at_once(tmp_path: Path, running: StoreExecutor, path: str) -> None:
    (tmp_path / "first").mkdir()
    first = Upload(tmp_path / "first", store := CountingStore(), running)
    await first.sent()
    journal = Journal(first.journal.place)
    journal.dropped(path)
    journal.close()
    assert journal.taken == {f"{NAME}/{path}"}
    again = Journal(first.journal.place)
    assert again.taken == {f"{NAME}/{path}"}, "also after a restart"
    assert store.bodies() == len(first.keys)
