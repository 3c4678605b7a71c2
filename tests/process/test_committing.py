"""The documents of a checkpoint in the store, as several nodes write and take them back at the same time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable

import pytest

from sidecar.core import checksum, keys
from sidecar.core.commit import Mend, Ready, Wait
from sidecar.core.local import Finished, FoundFile
from sidecar.core.manifest import FileEntry
from sidecar.store.memory import MemoryStore
from sidecar.transfer import Health, RateGate, Transfers
from sidecar.upload.committing import Committer, manifest_of
from trainer_hook.contract import Node

NAME = "checkpoint-20"


@pytest.fixture
async def transfers() -> AsyncIterator[Transfers]:
    running = Transfers(concurrency=2, gate=RateGate(None), health=Health())
    yield running
    running.close()


class Pod:
    """One node's part of a step, sent in whole by one call."""

    def __init__(self, store: MemoryStore, transfers: Transfers, index: int, count: int = 2) -> None:
        self.store, self.node = store, Node(index, count)
        self.committer = Committer(store, transfers)

    def checkpoint(self, attempt: str) -> Finished:
        return Finished(NAME, "v", 20, "periodic", attempt, self.node, 1.8e9, None, (), {})

    def key(self, attempt: str) -> str:
        return keys.manifest(NAME, attempt, self.node)

    async def publish(self, content: bytes, attempt: str, *, path: str | None = None) -> None:
        path = path or f"shard-{self.node.index}"
        key = keys.shared_file(NAME, path)
        etag = self.store.put(key, content).etag
        crc = checksum.to_text(checksum.checksum(content))
        entry = FileEntry(path=path, key=key, size_bytes=len(content), crc64nvme=crc, etag=etag)
        await self.committer.publish_manifest(manifest_of(self.checkpoint(attempt), [entry]))


class HeldDelete(MemoryStore):
    """Holds the deletion of one key back until told."""

    def __init__(self) -> None:
        super().__init__()
        self.held_key: str | None = None
        self.reached, self.go_on = threading.Event(), threading.Event()

    def delete(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        if self.held_key in wanted:
            self.held_key = None
            self.reached.set()
            self.go_on.wait(20)
        super().delete(wanted)


async def test_a_node_that_makes_way_late_leaves_what_the_others_published_meanwhile(transfers: Transfers) -> None:
    store = HeldDelete()
    fast, slow = (Pod(store, transfers, index) for index in (0, 1))
    for pod in (fast, slow):
        await pod.publish(b"old", "a")
    assert isinstance(await fast.committer.try_commit(fast.checkpoint("a")), Ready)

    store.held_key = keys.commit(NAME)
    late = asyncio.create_task(slow.committer.make_way(NAME))
    await asyncio.to_thread(store.reached.wait, 10)
    await fast.committer.make_way(NAME)
    await fast.publish(b"new", "b")
    store.go_on.set()
    await late
    await slow.publish(b"new", "b")

    assert isinstance(await slow.committer.try_commit(slow.checkpoint("b")), Ready)
    assert store.get(fast.key("b"))


async def test_a_node_whose_manifest_was_taken_publishes_it_again(transfers: Transfers) -> None:
    store = MemoryStore()
    pod = Pod(store, transfers, 0, count=1)
    await pod.publish(b"new", "b")
    store.delete([pod.key("b")])
    decision = await pod.committer.try_commit(pod.checkpoint("b"))
    assert isinstance(decision, Mend)
    assert not decision.files


async def test_no_commit_mixes_a_part_that_is_written_again_with_old_parts_of_the_others(transfers: Transfers) -> None:
    store = MemoryStore()
    pods = [Pod(store, transfers, index, count=3) for index in range(3)]
    for pod in pods:
        await pod.publish(b"v1", "a")
    assert isinstance(await pods[0].committer.try_commit(pods[0].checkpoint("a")), Ready)

    await pods[0].committer.make_way(NAME)
    await pods[0].publish(b"v2", "a")
    assert await pods[0].committer.try_commit(pods[0].checkpoint("a")) == Wait("waiting for node 1, 2 of 3")
    await pods[2].publish(b"v2", "a")
    assert await pods[2].committer.try_commit(pods[2].checkpoint("a")) == Wait("waiting for node 1 of 3")
    await pods[1].publish(b"v2", "a")
    assert isinstance(await pods[1].committer.try_commit(pods[1].checkpoint("a")), Ready)
    assert {store.get(keys.shared_file(NAME, f"shard-{index}")) for index in range(3)} == {b"v2"}


async def test_a_commit_that_cannot_be_read_is_taken_back_with_every_manifest(transfers: Transfers) -> None:
    store = MemoryStore()
    pod = Pod(store, transfers, 0)
    await pod.publish(b"v1", "a")
    store.put(keys.commit(NAME), b"{")
    await pod.committer.make_way(NAME)
    assert [stored.key for stored in store.list(keys.folder(NAME))] == [keys.shared_file(NAME, "shard-0")]


async def test_a_commit_sweeps_what_nobody_names_and_nothing_of_an_attempt_that_is_at_work(transfers: Transfers) -> None:
    store = MemoryStore()
    ours, theirs = Pod(store, transfers, 0, count=1), Pod(store, transfers, 1)
    await theirs.publish(b"theirs", "later", path="theirs")
    store.put(keys.shared_file(NAME, "nobody's"), b"left over")
    store.put(keys.manifest(NAME, "a", Node(0, 9)), b"of a job of another size")
    await ours.publish(b"ours", "a", path="ours")
    assert isinstance(await ours.committer.try_commit(ours.checkpoint("a")), Ready)
    await ours.committer.sweep(ours.checkpoint("a"))
    assert {stored.key for stored in store.list(keys.folder(NAME))} == {
        keys.commit(NAME),
        ours.key("a"),
        theirs.key("later"),
        keys.shared_file(NAME, "ours"),
        keys.shared_file(NAME, "theirs"),
    }


def finished(node: Node, *, save_id: str | None = "1") -> Finished:
    files = (FoundFile(f"shard-{node.index}", 2, 0, 0),)
    return Finished(NAME, "v", 20, "periodic", "a", node, 1.8e9, None, files, {}, save_id=save_id)


async def test_what_a_late_request_hit_after_the_commit_is_found_and_taken_back(transfers: Transfers) -> None:
    store = MemoryStore()
    pod = Pod(store, transfers, 0, count=1)
    checkpoint = finished(pod.node, save_id=None)
    await pod.publish(b"v1", "a")
    assert isinstance(await pod.committer.try_commit(checkpoint), Ready)
    assert await pod.committer.still_stands(checkpoint, thoroughly=True)
    store.put(keys.shared_file(NAME, "shard-0"), b"v1")  # the same again, under another etag
    assert await pod.committer.still_stands(checkpoint, thoroughly=True)
    store.put(keys.shared_file(NAME, "shard-0"), b"zz")
    assert not await pod.committer.still_stands(checkpoint, thoroughly=True)
    assert keys.commit(NAME) not in {stored.key for stored in store.list("")}
    assert not await pod.committer.still_stands(checkpoint, thoroughly=False)


async def test_a_step_that_somebody_deleted_is_not_sent_again(transfers: Transfers) -> None:
    store = MemoryStore()
    pod = Pod(store, transfers, 0, count=1)
    await pod.publish(b"v1", "a")
    assert isinstance(await pod.committer.try_commit(finished(pod.node, save_id=None)), Ready)
    store.delete([stored.key for stored in list(store.list(""))])
    assert await pod.committer.still_stands(finished(pod.node, save_id=None), thoroughly=False)


async def test_another_commit_than_the_one_that_was_judged_stays(transfers: Transfers) -> None:
    store = MemoryStore()
    pod = Pod(store, transfers, 0, count=1)
    await pod.publish(b"v1", "a")
    await pod.committer.try_commit(pod.checkpoint("a"))
    judged = await pod.committer.standing(NAME)
    await pod.committer.make_way(NAME)
    await pod.publish(b"v2", "b")
    await pod.committer.try_commit(pod.checkpoint("b"))
    assert not await pod.committer.make_way(NAME, judged=judged)
    assert await pod.committer.standing(NAME) is not None
