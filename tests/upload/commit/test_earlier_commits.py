"""What a start does about the commits that earlier sidecars wrote last."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest

from sidecar.catalog.catalog import Catalog
from sidecar.catalog.events import Events
from sidecar.core.commit.commit import ReadyToCommit
from sidecar.core.format import keys
from sidecar.core.lifecycle.states import State
from sidecar.core.lifecycle.unchecked_commits import MOST
from sidecar.errors import AccessRefused
from sidecar.lifecycle.deadline import Deadline
from sidecar.store.protocol import Readable, Stored
from sidecar.transfer.executor import StoreExecutor
from sidecar.upload.commit import earlier_commits
from sidecar.upload.commit.earlier_commits import EarlierCommits
from tests.store.memory import MemoryStore
from tests.upload.commit.test_committer import COMMIT, NAME, Pod, executor

__all__ = ["executor"]

OBJECT = keys.shared_file(NAME, "shard-0")


class TimedStore(MemoryStore):
    """Lists the time of each write: all at once. Counts the bytes read, and refuses what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.read_bytes = 0
        self.refused: str | None = None
        self.asked: list[str] = []

    def _stored(self, key: str) -> Stored:
        return replace(super()._stored(key), modified="2030-01-31T12:00:00Z")

    def list(self, prefix: str) -> Iterator[Stored]:
        self.asked.append(prefix)
        if prefix == self.refused:
            raise AccessRefused("denied")
        return super().list(prefix)

    @contextmanager
    def read(self, key: str, *, offset: int = 0, length: int | None = None, etag: str | None = None) -> Iterator[Readable]:
        self.read_bytes += length or 0
        with super().read(key, offset=offset, length=length, etag=etag) as body:
            yield body


@dataclass
class Found:
    """Commits that were quarantined: reason and missing object, by name."""

    added: dict[str, tuple[str, str | None]] = field(default_factory=dict)

    def add(self, name: str, crc: str, reason: str, *, missing: str | None = None) -> None:
        self.added[name] = reason, missing


@dataclass
class Resumes:
    are_answered: bool = True


class Start:
    """A step that an earlier pod has committed, and the start of the next one."""

    def __init__(self, store: TimedStore, executor: StoreExecutor, pod: Pod) -> None:
        self.store, self.pod, self.found, self.catalog = store, pod, Found(), Catalog(Events())
        self.deadline, self.resumes = Deadline(), Resumes()
        self.earlier = EarlierCommits(
            store,
            executor,
            pod.committer,
            self.catalog,
            self.found,
            Events(),
            resumes=self.resumes,
            deadline=self.deadline,
        )


async def started(executor: StoreExecutor, *, nodes: int = 1) -> Start:
    store = TimedStore()
    pods = [Pod(store, executor, index, nodes) for index in range(nodes)]
    for pod in pods:
        await pod.publish(b"part", "a")
    assert isinstance(await pods[0].committer.try_commit(pods[0].checkpoint("a")), ReadyToCommit)
    return Start(store, executor, pods[0])


@pytest.fixture
async def start(executor: StoreExecutor) -> Start:
    return await started(executor)


async def test_a_whole_commit_costs_a_few_requests_and_no_data(start: Start) -> None:
    start.store.asked.clear()
    await start.earlier.check()
    assert not start.found.added
    assert not start.store.read_bytes
    assert len(start.store.asked) <= 4


async def test_a_replaced_object_and_a_missing_one_are_told_apart(start: Start) -> None:
    start.store.put(OBJECT, b"else")
    await start.earlier.check()
    assert start.found.added == {NAME: (f"{OBJECT}: not the object that its writer recorded", None)}
    start.store.delete([OBJECT])
    await start.earlier.check()
    assert start.found.added == {NAME: (f"{OBJECT}: missing in the store", OBJECT)}


async def test_a_part_of_several_nodes_is_quarantined_because_the_others_would_not_send_theirs(executor: StoreExecutor) -> None:
    start = await started(executor, nodes=2)
    start.catalog.durable(start.catalog.finished(start.pod.checkpoint("a"), held=True), at_s=1.9e9)
    start.store.put(OBJECT, b"else")
    await start.earlier.check()
    assert start.store.get(COMMIT)
    assert set(start.found.added) == {NAME}


async def test_a_step_of_this_volume_is_sent_again_by_its_upload(start: Start) -> None:
    """It was revoked here: a timeout in between left it without a commit, as "committed"."""
    tracked = start.catalog.finished(start.pod.checkpoint("a"), held=True)
    start.store.put(OBJECT, b"else")
    await start.earlier.check()
    assert tracked.state is State.FINISHED, "its upload compares it"
    assert not start.found.added
    start.catalog.durable(tracked, at_s=1.9e9)
    await start.earlier.check()
    assert tracked.state is State.FINISHED
    assert start.store.get(COMMIT), "its upload revokes that, if the lease permits it"
    assert set(start.found.added) == {NAME}


async def test_a_copy_of_a_bucket_with_etags_of_its_own_is_not_read_beyond_the_limit(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start.store.put(OBJECT, b"part")  # another etag, the same content
    await start.earlier.check()
    assert start.store.read_bytes == len(b"part")
    monkeypatch.setattr(earlier_commits, "MOST_READ_BYTES", 3)
    await start.earlier.check()
    assert start.store.read_bytes == len(b"part")
    start.store.put(OBJECT, b"larger")  # what needs no read is found anyway
    await start.earlier.check()
    assert set(start.found.added) == {NAME}


async def test_no_more_than_a_few_commits_are_asked_for_and_none_that_cannot_be_read_hides_another(start: Start) -> None:
    for step in range(100, 200):
        start.store.put(keys.commit(f"checkpoint-{step}"), b'{"format": 2}')
    start.store.delete([keys.commit(f"checkpoint-{step}") for step in range(100, 194)])
    start.store.delete([OBJECT])
    start.store.asked.clear()
    await start.earlier.check()
    assert set(start.found.added) == {NAME}
    assert len([prefix for prefix in start.store.asked if prefix.endswith("/.complete")]) <= MOST


async def test_a_store_that_refuses_or_a_pod_that_ends_leaves_it_to_the_next_start(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start.store.delete([OBJECT])
    with monkeypatch.context() as soon:
        soon.setattr(earlier_commits, "ANSWER_S", 0.2)
        for prefix in (COMMIT, keys.folder(NAME)):
            start.store.refused = prefix
            await start.earlier.check()
    start.store.refused = None
    start.deadline.set(kill_at_s=0.0)
    await start.earlier.check()
    assert not start.found.added
    start.deadline.clear()
    await start.earlier.check()
    assert set(start.found.added) == {NAME}


async def test_a_time_that_ends_within_the_quarantine_changes_nothing_and_the_next_check_finds_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracked = start.catalog.finished(start.pod.checkpoint("a"), held=True)
    start.catalog.durable(tracked, at_s=1.9e9)
    start.store.put(OBJECT, b"else")
    with monkeypatch.context() as soon:
        soon.setattr(earlier_commits, "ANSWER_S", 0.2)
        start.store.refused = OBJECT  # read by the quarantine alone: whether the object is missing
        await start.earlier.check()
    assert OBJECT in start.store.asked
    assert (start.found.added, tracked.state) == ({}, State.COMMITTED)
    start.store.refused = None
    await start.earlier.check()
    assert (set(start.found.added), tracked.state) == ({NAME}, State.FINISHED)
    assert start.catalog.newest_durable_step is None
    assert start.store.get(COMMIT), "its upload revokes that"


async def test_a_resume_goes_first(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier_commits, "POLL_S", 0.01)
    start.store.delete([OBJECT])
    start.resumes.are_answered = False
    checking = asyncio.create_task(start.earlier.check())
    await asyncio.sleep(0.2)
    assert not start.found.added
    start.resumes.are_answered = True
    await checking
    assert set(start.found.added) == {NAME}
