"""The documents of a checkpoint in the store, as several nodes write and take them back at the same time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from sidecar.core.commit.commit import ReadyToCommit, Reupload, Wait, manifest_of
from sidecar.core.commit.rewrite import AlreadyCommitted, Replace
from sidecar.core.format import checksum, keys
from sidecar.core.format import manifest as manifest_module
from sidecar.core.format.found_checkpoint import Finished, FoundFile
from sidecar.core.format.manifest import MAX_DOCUMENT_BYTES, FileEntry
from sidecar.errors import NeverDurable, NotFound, StoreUnavailable
from sidecar.lifecycle.lease import NoLease
from sidecar.repository.documents import StoredCommit
from sidecar.store.protocol import Stored
from sidecar.transfer.executor import StoreExecutor
from sidecar.transfer.health import Health
from sidecar.transfer.rate_gate import RateGate
from sidecar.upload.commit.committer import MAX_POLLS, Committer
from sidecar.upload.commit.existing_commit import ExistingCommit
from sidecar.upload.commit.overwrite_guard import Outdated
from tests.store.memory import MemoryStore
from trainer_hook.contract import Node

NAME = "checkpoint-20"
COMMIT = keys.commit(NAME)


@pytest.fixture
async def executor() -> AsyncIterator[StoreExecutor]:
    running = StoreExecutor(concurrency=2, gate=RateGate(None), health=Health())
    yield running
    running.close()


class Pod:
    """One node's part of a step, sent in whole by one call."""

    def __init__(self, store: MemoryStore, executor: StoreExecutor, index: int, count: int = 2) -> None:
        self.store, self.node = store, Node(index, count)
        self.committer = Committer(store, executor)

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


async def test_a_commit_of_more_files_than_a_reader_takes_is_not_written(
    executor: StoreExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_module, "MAX_FILES", 1)
    store = MemoryStore()
    pods = [Pod(store, executor, index) for index in (0, 1)]
    for pod in pods:
        await pod.publish(b"part", "a")
    with pytest.raises(NeverDurable, match="it has 2 files, the maximum is 1: save fewer and larger files"):
        await pods[0].committer.try_commit(pods[0].checkpoint("a"))
    with pytest.raises(NotFound):
        store.get(COMMIT)


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


class OnceDamaged(MemoryStore):
    """Damages the first answer of one kind in transit."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind: str | None = None
        self._planned = kind

    def begin(self) -> None:
        self.kind = self._planned

    def list(self, prefix: str) -> Iterator[Stored]:
        found = list(super().list(prefix))
        if self.kind is not None and self.kind.startswith("listed"):
            change = {"size_bytes": 9} if self.kind == "listed size" else {"etag": "0"} if self.kind == "listed etag" else {}
            is_data = [stored.key.endswith("shard-0") for stored in found]
            if any(is_data):
                self.kind = None
            found = [
                replace(s, **change) if is_it else s for s, is_it in zip(found, is_data, strict=True) if change or not is_it
            ]
        return iter(found)

    def get(self, key: str, *, most_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        raw = super().get(key, most_bytes=most_bytes)
        if self.kind == "manifest" and key != COMMIT:
            self.kind = None
            return bytes([raw[0] ^ 1]) + raw[1:]
        return raw


@pytest.mark.parametrize("kind", ["listed size", "listed etag", "listed name", "manifest"])
async def test_an_answer_that_is_damaged_on_the_way_revokes_no_commit(kind: str, executor: StoreExecutor) -> None:
    """A durable step was revoked and sent again after a flipped bit in one listing."""
    store = OnceDamaged(kind)
    pod = Pod(store, executor, 0, count=1)
    await pod.publish(b"part", "a")
    ready = await pod.committer.try_commit(pod.checkpoint("a"))
    assert isinstance(ready, ReadyToCommit)
    there = await pod.committer.stored_commit(NAME)
    assert there is not None
    assert there.commit is not None
    store.begin()
    assert await pod.committer.part(there.commit, pod.node) is not None, "without its part, the commit would be replaced"
    assert await pod.committer.damaged(there.commit) == []
    assert store.kind is None, "it was damaged"
    # What is damaged in the store is found.
    manifest = store.get(pod.key("a"))
    store.put(pod.key("a"), bytes([manifest[0] ^ 1]) + manifest[1:])
    assert await pod.committer.damaged(there.commit) == [pod.key("a")]
    store.put(pod.key("a"), manifest)
    store.put(keys.shared_file(NAME, "shard-0"), b"torn")
    assert await pod.committer.damaged(there.commit) == [keys.shared_file(NAME, "shard-0")]
    store.delete([keys.shared_file(NAME, "shard-0")])
    assert await pod.committer.damaged(there.commit) == [keys.shared_file(NAME, "shard-0")]


async def test_a_node_that_makes_way_late_leaves_what_the_others_published_meanwhile(executor: StoreExecutor) -> None:
    store = HeldDelete()
    fast, slow = (Pod(store, executor, index) for index in (0, 1))
    for pod in (fast, slow):
        await pod.publish(b"old", "a")
    assert isinstance(await fast.committer.try_commit(fast.checkpoint("a")), ReadyToCommit)

    store.held_key = keys.commit(NAME)
    late = asyncio.create_task(slow.committer.revoke_commit(NAME))
    await asyncio.to_thread(store.reached.wait, 10)
    await fast.committer.revoke_commit(NAME)
    await fast.publish(b"new", "b")
    store.go_on.set()
    await late
    await slow.publish(b"new", "b")

    assert isinstance(await slow.committer.try_commit(slow.checkpoint("b")), ReadyToCommit)
    assert store.get(fast.key("b"))


async def test_a_node_whose_manifest_was_taken_publishes_it_again(executor: StoreExecutor) -> None:
    store = MemoryStore()
    pod = Pod(store, executor, 0, count=1)
    await pod.publish(b"new", "b")
    store.delete([pod.key("b")])
    decision = await pod.committer.try_commit(pod.checkpoint("b"))
    assert isinstance(decision, Reupload)
    assert not decision.files


@pytest.mark.parametrize(("other", "stands"), [("20260301T120000Z-z", False), ("20260302T120000Z-b", True)])
async def test_a_revoked_commit_is_not_repaired_while_a_later_attempt_sends_the_step(
    executor: StoreExecutor, other: str, stands: bool
) -> None:
    """Two attempts replaced each other's commits for ever."""
    store, attempt = MemoryStore(), "20260301T130000Z-a"
    pod, others = Pod(store, executor, 0, count=1), Pod(store, executor, 0, count=1)
    ours = replace(pod.checkpoint(attempt), files=(FoundFile("shard-0", 2, 0, 0),))
    await pod.publish(b"v1", attempt)
    assert isinstance(await pod.committer.try_commit(ours), ReadyToCommit)
    await others.committer.revoke_commit(NAME)
    assert not await pod.committer.is_still_committed(ours, thoroughly=False)
    await others.publish(b"v2", other)
    assert await pod.committer.is_still_committed(ours, thoroughly=False) is stands


async def test_no_commit_mixes_a_part_that_is_written_again_with_old_parts_of_the_others(executor: StoreExecutor) -> None:
    store = MemoryStore()
    pods = [Pod(store, executor, index, count=3) for index in range(3)]
    for pod in pods:
        await pod.publish(b"v1", "a")
    assert isinstance(await pods[0].committer.try_commit(pods[0].checkpoint("a")), ReadyToCommit)

    await pods[0].committer.revoke_commit(NAME)
    await pods[0].publish(b"v2", "a")
    assert await pods[0].committer.try_commit(pods[0].checkpoint("a")) == Wait("waiting for node 1, 2 of 3")
    await pods[2].publish(b"v2", "a")
    assert await pods[2].committer.try_commit(pods[2].checkpoint("a")) == Wait("waiting for node 1 of 3")
    await pods[1].publish(b"v2", "a")
    assert isinstance(await pods[1].committer.try_commit(pods[1].checkpoint("a")), ReadyToCommit)
    assert {store.get(keys.shared_file(NAME, f"shard-{index}")) for index in range(3)} == {b"v2"}


async def test_a_commit_that_cannot_be_read_is_taken_back_with_every_manifest(executor: StoreExecutor) -> None:
    store = MemoryStore()
    pod = Pod(store, executor, 0)
    await pod.publish(b"v1", "a")
    store.put(keys.commit(NAME), b"{")
    await pod.committer.revoke_commit(NAME)
    assert [stored.key for stored in store.list(keys.folder(NAME))] == [keys.shared_file(NAME, "shard-0")]


async def test_a_commit_sweeps_what_nobody_names_and_nothing_of_an_attempt_that_is_at_work(executor: StoreExecutor) -> None:
    store = MemoryStore()
    ours, theirs = Pod(store, executor, 0, count=1), Pod(store, executor, 1)
    await theirs.publish(b"theirs", "later", path="theirs")
    store.put(keys.shared_file(NAME, "nobody's"), b"left over")
    store.put(keys.manifest(NAME, "a", Node(0, 9)), b"of a job of another size")
    await ours.publish(b"ours", "a", path="ours")
    assert isinstance(await ours.committer.try_commit(ours.checkpoint("a")), ReadyToCommit)
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


async def test_what_a_late_request_hit_after_the_commit_is_found_and_taken_back(executor: StoreExecutor) -> None:
    store = MemoryStore()
    pod = Pod(store, executor, 0, count=1)
    checkpoint = finished(pod.node, save_id=None)
    await pod.publish(b"v1", "a")
    assert isinstance(await pod.committer.try_commit(checkpoint), ReadyToCommit)
    assert await pod.committer.is_still_committed(checkpoint, thoroughly=True)
    store.put(keys.shared_file(NAME, "shard-0"), b"v1")  # the same again, under another etag
    assert await pod.committer.is_still_committed(checkpoint, thoroughly=True)
    store.put(keys.shared_file(NAME, "shard-0"), b"zz")
    assert not await pod.committer.is_still_committed(checkpoint, thoroughly=True)
    assert keys.commit(NAME) not in {stored.key for stored in store.list("")}
    assert not await pod.committer.is_still_committed(checkpoint, thoroughly=False)


async def test_a_step_that_somebody_deleted_is_not_sent_again(executor: StoreExecutor) -> None:
    store = MemoryStore()
    pod = Pod(store, executor, 0, count=1)
    await pod.publish(b"v1", "a")
    assert isinstance(await pod.committer.try_commit(finished(pod.node, save_id=None)), ReadyToCommit)
    store.delete([stored.key for stored in list(store.list(""))])
    assert await pod.committer.is_still_committed(finished(pod.node, save_id=None), thoroughly=False)


async def test_another_commit_than_the_one_that_was_judged_stays(executor: StoreExecutor) -> None:
    store = MemoryStore()
    pod = Pod(store, executor, 0, count=1)
    await pod.publish(b"v1", "a")
    await pod.committer.try_commit(pod.checkpoint("a"))
    judged = await pod.committer.stored_commit(NAME)
    await pod.committer.revoke_commit(NAME)
    await pod.publish(b"v2", "b")
    await pod.committer.try_commit(pod.checkpoint("b"))
    assert not await pod.committer.revoke_commit(NAME, judged=judged)
    assert await pod.committer.stored_commit(NAME) is not None


class LostAnswer(MemoryStore):
    """Deletes a commit, and does not say so; before it is asked again, another node commits the step."""

    def __init__(self) -> None:
        super().__init__()
        self.theirs = b""

    def delete(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        super().delete(wanted)
        if self.theirs and wanted == [COMMIT]:
            self.put(COMMIT, self.theirs)
            self.theirs = b""
            raise StoreUnavailable("the answer was lost")


async def test_a_deletion_that_is_tried_again_leaves_what_another_node_committed_meanwhile(executor: StoreExecutor) -> None:
    store = LostAnswer()
    pod = Pod(store, executor, 0, count=1)
    await pod.publish(b"v1", "a")
    await pod.committer.try_commit(pod.checkpoint("a"))
    judged = await pod.committer.stored_commit(NAME)
    theirs = store.theirs = store.get(COMMIT).replace(b'"a"', b'"b"')
    assert not await pod.committer.revoke_commit(NAME, judged=judged)
    assert store.get(COMMIT) == theirs
    assert pod.key("a") in [stored.key for stored in store.list("")]


class Undecided(NoLease):
    """A later pod holds the prefix and has not declared an attempt yet: it decides what to resume."""

    def __init__(self) -> None:
        self.reason: str | None = None

    async def reason_not_to_commit(self, node: Node, attempt: str) -> str | None:
        return self.reason


async def committed_by_two(store: MemoryStore, executor: StoreExecutor) -> tuple[Pod, StoredCommit]:
    """Return node 1 of two, and the commit that it wrote."""
    zero, one = (Pod(store, executor, index) for index in (0, 1))
    for pod in (zero, one):
        await pod.publish(b"part", "a")
    assert isinstance(await one.committer.try_commit(one.checkpoint("a")), ReadyToCommit)
    there = await one.committer.stored_commit(NAME)
    assert there is not None
    return one, there


async def test_a_save_that_may_not_be_committed_now_revokes_no_commit(executor: StoreExecutor) -> None:
    """A node of the attempt before revoked the step that the later pod had just chosen, and could not commit its own."""
    store, lease = MemoryStore(), Undecided()
    pod, there = await committed_by_two(store, executor)
    pod.committer.lease = lease
    again = replace(pod.checkpoint("a"), created_at_s=1.8e9 + 5, save_id="later")
    lease.reason = "node 0 has not declared attempt a its own yet"
    existing = ExistingCommit(pod.committer, executor, NothingDamaged())
    contents: Any = None
    comparison = await existing.compare(again, contents, there)
    with pytest.raises(Outdated, match="not declared"):
        await existing.conclude(comparison)
    assert store.get(COMMIT)
    lease.reason = None
    assert isinstance(await existing.conclude(comparison), Replace)
    with pytest.raises(NotFound):
        store.get(COMMIT)


async def test_what_the_store_holds_already_is_durable_without_a_permission(executor: StoreExecutor) -> None:
    """On a node above 0, committed checkpoints of an earlier attempt waited for a declaration that comes after the resume."""
    store, lease = MemoryStore(), Undecided()
    pod, there = await committed_by_two(store, executor)
    pod.committer.lease, lease.reason = lease, "node 0 has not declared attempt a its own yet"
    checkpoint = replace(pod.checkpoint("a"), files=(FoundFile("shard-1", 4, 0, 0),))
    contents: Any = Holds({"shard-1": b"part"})
    existing = ExistingCommit(pod.committer, executor, NothingDamaged())
    comparison = await existing.compare(checkpoint, contents, there)
    assert not comparison.needs_permission
    assert isinstance(await existing.conclude(comparison), AlreadyCommitted)
    # A commit of damaged objects is replaced, and for that it is.
    store.put(keys.shared_file(NAME, "shard-0"), b"torn")
    comparison = await existing.compare(checkpoint, contents, there)
    assert comparison.needs_permission
    with pytest.raises(Outdated, match="not declared"):
        await existing.conclude(comparison)
    assert store.get(COMMIT)


class Holds:
    def __init__(self, files: dict[str, bytes]) -> None:
        self._files = files

    def checksums(self, path: str, ranges: list[tuple[int, int]]) -> list[int]:
        return [checksum.checksum(self._files[path][offset : offset + length]) for offset, length in ranges]


class NothingDamaged:
    def reason(self, name: str, crc: str) -> str | None:
        return None


async def test_of_thousands_of_commits_the_latest_are_remembered(executor: StoreExecutor) -> None:
    pod = Pod(MemoryStore(), executor, 0, count=1)
    for attempt in (f"a{number}" for number in range(MAX_POLLS + 5)):
        pod.store.delete([COMMIT])
        await pod.publish(b"v1", attempt)
        assert isinstance(await pod.committer.try_commit(pod.checkpoint(attempt)), ReadyToCommit)
    assert len(pod.committer._written) == MAX_POLLS
