"""What one node's retention deletes from a store, with what happens to commits between its looks."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from sidecar.catalog.events import Events
from sidecar.core.commit.commit import commit_of, manifest_entry
from sidecar.core.commit.retention import StorePlan
from sidecar.core.format import checksum, keys
from sidecar.core.format.manifest import MAX_DOCUMENT_BYTES, FileEntry, Manifest, NodeOf, Quarantined, encode
from sidecar.errors import AlreadyExists, StoreUnavailable
from sidecar.retention import store_retention
from sidecar.retention.known_steps import KnownSteps
from sidecar.retention.store_retention import READ_AGAIN, SETTLED_S, StoreRetention
from sidecar.transfer.clock import Clock
from sidecar.transfer.executor import StoreExecutor
from sidecar.transfer.health import Health
from sidecar.transfer.rate_gate import RateGate
from tests.store.memory import MemoryStore
from trainer_hook.contract import rfc3339

EPOCH_S = 1.8e9
ATTEMPT = "20270115T120000Z-a"


class Known(KnownSteps):
    """What a test lets a node know. ``None``: it may be all steps."""

    def __init__(self, protected: set[str]) -> None:
        self.protected = protected
        self.rewritten: set[str] | None = None
        self.pending: set[str] | None = None

    def in_use(self) -> frozenset[str]:
        return frozenset(self.protected)

    def may_be_rewritten(self, name: str) -> bool:
        return self.rewritten is None or name in self.rewritten

    def is_pending(self, name: str) -> bool:
        return self.pending is None or name in self.pending


class Kept:
    """A store and the retention of one node; ``keep``: its ``CKPT_KEEP_STORE``."""

    def __init__(
        self, executor: StoreExecutor, keep: int, store: MemoryStore | None = None, *, keep_every_steps: int | None = None
    ) -> None:
        self.store = store or MemoryStore()
        self._keep_every_steps = keep_every_steps
        self.protected: set[str] = set()
        self._executor = executor
        self._keep = keep
        self.now_s = 0.0
        self.start()

    def start(self) -> None:
        """Begin another life of the sidecar, which knows nothing of the one before."""
        self.known = Known(self.protected)
        self.retention = StoreRetention(
            self.store,
            self._executor,
            keep_newest=self._keep,
            keep_every_steps=self._keep_every_steps,
            known=self.known,
            events=Events(),
            clock=Clock(monotonic=lambda: self.now_s),
        )

    async def run_once(self) -> set[int]:
        """Look until nothing is left to wait for; return the committed steps."""
        while (again_s := await self.retention.run_once()) is not None:
            self.now_s += again_s + 0.01
        return self.committed()

    def committed(self) -> set[int]:
        folders = {stored.key.partition("/")[0] for stored in self.store.list("") if stored.key.endswith("/.complete")}
        return {int(name.removeprefix("checkpoint-")) for name in folders}

    def commit(self, step: int, *, attempt: str = ATTEMPT, created_at_s: float | None = None) -> str:
        """Commit a step; return the checksum of its commit."""
        name, content = f"checkpoint-{step}", f"{attempt} {step}".encode()
        key = keys.shared_file(name, "model")
        entry = FileEntry(
            path="model",
            key=key,
            size_bytes=len(content),
            crc64nvme=checksum.text_of(content),
            etag=self.store.put(key, content).etag,
        )
        created_at = rfc3339(EPOCH_S + (step if created_at_s is None else created_at_s))
        node = NodeOf(index=0, count=1)
        manifest = Manifest(name=name, step=step, attempt=attempt, node=node, created_at=created_at, files=(entry,))
        raw = encode(manifest)
        self.store.put(manifest_entry(manifest, raw).key, raw)
        commit = encode(commit_of([manifest], {0: raw}, committed_at=created_at))
        self.store.put(keys.commit(name), commit)
        return checksum.text_of(commit)


@pytest.fixture
def executor() -> Iterator[StoreExecutor]:
    running = StoreExecutor(concurrency=2, gate=RateGate(None), health=Health())
    yield running
    running.close()


@pytest.mark.parametrize("harm", ["damaged", "deleted", "quarantined"])
async def test_what_was_whole_a_while_ago_makes_nothing_go_if_it_is_not_now(harm: str, executor: StoreExecutor) -> None:
    kept = Kept(executor, 2)
    for step in (10, 20, 30):
        crc = kept.commit(step)
        await kept.run_once()
    assert kept.committed() == {20, 30}
    match harm:
        case "damaged":
            kept.store.put("checkpoint-30/model", b"of a late request")
        case "deleted":
            kept.store.delete(["checkpoint-30/model"])
        case _:
            document = Quarantined(commit_crc64nvme=crc, reason="its bytes are others")
            kept.store.put(keys.quarantined("checkpoint-30", crc), encode(document))
    kept.commit(40)
    assert await kept.run_once() == {20, 30, 40}
    kept.commit(50)
    assert await kept.run_once() == {40, 50}


async def test_a_run_that_went_back_keeps_what_it_saves_whatever_clocks_say_and_however_often_its_pod_starts(
    executor: StoreExecutor,
) -> None:
    kept = Kept(executor, 2)
    for step in (200, 300, 400):
        kept.commit(step)
        await kept.run_once()
    # Its clock is an hour behind that of the pod before it, and its markers do not say from where it continues.
    for step in (210, 220):
        kept.commit(step, attempt="20270115T110000Z-b", created_at_s=step - 3600.0)
        kept.start()
        await kept.run_once()
        kept.start()
        assert step in await kept.run_once()
    assert {210, 220, 300, 400} <= kept.committed()


class CommittedAnew(MemoryStore):
    """Fails the first deletion of a step's files; before it is tried again the step is committed by another attempt."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Kept | None = None

    def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        if self.kept is not None and "checkpoint-10/model" in keys:
            kept, self.kept = self.kept, None
            kept.commit(10, attempt="20270115T130000Z-b")
            raise StoreUnavailable("the answer was lost")
        super().delete(keys)


async def test_a_deletion_that_is_repeated_spares_what_was_committed_meanwhile(executor: StoreExecutor) -> None:
    store = CommittedAnew()
    kept = Kept(executor, 1, store)
    for step in (10, 20):
        kept.commit(step)
    store.kept = kept
    with pytest.raises(AlreadyExists):
        await kept.run_once()
    assert store.get("checkpoint-10/model") == b"20270115T130000Z-b 10"
    assert kept.committed() == {10, 20}


async def test_what_counts_in_the_place_of_a_damaged_one_was_written_no_earlier_either(executor: StoreExecutor) -> None:
    kept = Kept(executor, 2, keep_every_steps=20)
    for step in (20, 10, 30, 50):  # it went back behind 20, which only the store's times say
        kept.commit(step)
    kept.protected.add("checkpoint-10")
    await kept.run_once()
    kept.store.put("checkpoint-50/model", b"of a late request")
    kept.protected.clear()
    kept.now_s += 1.0
    assert await kept.run_once() == {10, 20, 30, 50}


class Counting(MemoryStore):
    """Counts what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    def get(self, key: str, *, most_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        self.asked[key] += 1
        return super().get(key, most_bytes=most_bytes)


def grown(executor: StoreExecutor, count: int) -> tuple[Counting, Kept]:
    store = Counting()
    kept = Kept(executor, 2, store, keep_every_steps=10)
    kept.known.rewritten = set()
    for step in range(10, 10 * count + 10, 10):
        kept.commit(step)
    return store, kept


async def test_a_commit_costs_as_much_in_a_store_of_many_as_in_one_of_few(executor: StoreExecutor) -> None:
    costs = []
    for count in (50, 400):
        store, kept = grown(executor, count)
        await kept.run_once()
        store.asked.clear()
        kept.commit(10 * count + 5)
        await kept.run_once()
        costs.append(store.asked.total())
    assert costs[1] <= costs[0] <= 2 * READ_AGAIN + 20, costs


async def test_commits_that_are_known_are_all_read_again_in_turn(executor: StoreExecutor) -> None:
    store, kept = grown(executor, 3 * READ_AGAIN)
    await kept.run_once()
    store.asked.clear()
    for _ in range(3):
        await kept.run_once()
    assert {keys.commit(f"checkpoint-{10 * number}") for number in range(1, 3 * READ_AGAIN + 1)} <= store.asked.keys()


@pytest.mark.parametrize("is_told", ["it is on the volume", "it became durable"])
async def test_a_commit_that_this_node_replaced_is_read_anew(is_told: str, executor: StoreExecutor) -> None:
    _, kept = grown(executor, 3 * READ_AGAIN)
    await kept.run_once()
    step = 10 * 3 * READ_AGAIN
    kept.commit(step, attempt="20270115T130000Z-b", created_at_s=3600.0 + step)
    if is_told == "it became durable":
        kept.retention.written(f"checkpoint-{step}")
    else:
        kept.known.rewritten = {f"checkpoint-{step}"}
    found = await kept.retention.plan()
    assert found.committed[f"checkpoint-{step}"].attempt == "20270115T130000Z-b"


async def test_a_commit_that_somebody_replaced_in_silence_is_not_deleted(executor: StoreExecutor) -> None:
    store, kept = grown(executor, 3 * READ_AGAIN)
    step = 10 * 3 * READ_AGAIN - 5
    kept.commit(step, created_at_s=step)
    await kept.retention.run_once()  # it is read, and too young to count
    assert step in kept.committed()
    kept.commit(step, attempt="20270115T130000Z-b", created_at_s=3600.0 + step)
    kept.now_s += SETTLED_S + 1
    for more in (5, 10, 15):
        kept.commit(step + 5 + more)
    await kept.run_once()
    assert store.get(f"checkpoint-{step}/model") == f"20270115T130000Z-b {step}".encode()


async def test_many_commits_are_judged_beside_the_event_loop(executor: StoreExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_retention, "MANY", 3)
    threads, real = set(), store_retention.plan_store_deletion

    def plan(*given: Any, **more: Any) -> StorePlan:
        threads.add(threading.current_thread())
        return real(*given, **more)

    monkeypatch.setattr(store_retention, "plan_store_deletion", plan)
    kept = Kept(executor, 2)
    for step in (10, 20, 30, 40):
        kept.commit(step)
    assert await kept.run_once() == {30, 40}
    assert threading.main_thread() not in threads


class Slow(MemoryStore):
    """Deletions of a checkpoint wait in their middle, after the commit is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.is_halfway, self.may_go_on = threading.Event(), threading.Event()

    def delete(self, keys: Iterable[str]) -> None:
        super().delete(keys)
        self.is_halfway.set()
        assert self.may_go_on.wait(10)


async def test_at_the_end_deletions_under_way_are_finished_and_no_other_begins(
    executor: StoreExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_retention, "DELETE_AT_ONCE", 1)
    store = Slow()
    kept = Kept(executor, 1, store)
    for step in (10, 20, 30):
        kept.commit(step)
    kept.retention._settled_s = 0
    cleaning = asyncio.create_task(kept.retention.run_once())
    await asyncio.to_thread(store.is_halfway.wait, 10)
    ending = asyncio.create_task(kept.retention.end())
    await asyncio.sleep(0.05)
    assert not ending.done()
    store.may_go_on.set()
    await ending
    left = {stored.key.partition("/")[0] for stored in store.list("")}
    assert left == {"checkpoint-20", "checkpoint-30"}, "nothing of the first is left, the second is untouched"
    assert await cleaning is None
    assert kept.committed() == {20, 30}


class Deleting(MemoryStore):
    """Notes for how many checkpoints a deletion waits at the same time; each waits until there are ``most``."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._together = threading.Barrier(most)

    def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        if any(key.endswith("/.complete") for key in keys):
            self._together.wait(10)
        super().delete(keys)


async def test_several_checkpoints_are_deleted_at_once(executor: StoreExecutor) -> None:
    kept = Kept(executor, 1, Deleting(2))
    for step in (10, 20, 30):
        kept.commit(step)
    assert await kept.run_once() == {30}
