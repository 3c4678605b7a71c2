"""What becomes of one checkpoint, by what its upload meets."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sidecar.catalog.catalog import Tracked
from sidecar.core.commit.commit import Reupload
from sidecar.core.format import checksum, keys, manifest
from sidecar.core.format.found_checkpoint import Finished, FoundFile
from sidecar.core.format.manifest import MAX_DOCUMENT_BYTES, FileEntry
from sidecar.core.lifecycle.states import State
from sidecar.core.schedule.parts import largest_file_bytes
from sidecar.errors import CheckpointChanged, CheckpointRejected, NotFound, StoreError, UnreadableFile
from sidecar.store.protocol import Stored
from sidecar.transfer.executor import StoreExecutor
from sidecar.upload.commit import committer
from sidecar.upload.commit.overwrite_guard import Outdated, OverwriteGuard
from sidecar.upload.commit.post_commit_check import PostCommitCheck
from sidecar.upload.context import UploadContext
from sidecar.upload.early.handover import Handover
from sidecar.upload.job import UploadJob
from sidecar.upload.schedule.queue import Active, Queue
from sidecar.upload.send.journal import Journal
from sidecar.upload.versions import Held, Sent
from sidecar.volume.opener import Folder
from tests.store.memory import MemoryStore
from tests.upload.parts import LastingPod, executor, uploads
from trainer_hook.contract import META_RESTORED, Node

NAME = "checkpoint-10"


@dataclass
class Versions:
    """An empty checkpoint's, which fails as it is told to."""

    folder: Path
    error: Exception | None = None
    no_marker: bool = False
    examined_again: list[str] = field(default_factory=list)
    let_go_of: list[str] = field(default_factory=list)

    async def hold(self, checkpoint: Finished) -> Held:
        nothing: Any = None
        return Held(nothing, nothing)

    def taken_over(self, active: Active, checkpoint: Finished) -> AbstractAsyncContextManager[Sent]:
        journal = Journal(Folder(self.folder) / f"{NAME}@1.jsonl")
        return nullcontext(Sent(journal, Handover(journal)))

    async def send(
        self, active: Active, checkpoint: Finished, held: Held, sent: Sent, guard: OverwriteGuard
    ) -> list[FileEntry]:
        if self.error is not None:
            raise self.error
        active.tracked.state = State.UPLOADING
        return []

    async def journal(self, checkpoint: Finished) -> Journal:
        return Journal(Folder(self.folder) / f"{NAME}@1.jsonl")

    def let_go(self, checkpoint: Finished) -> None:
        self.let_go_of.append(checkpoint.version)
        (Folder(self.folder) / f"{NAME}@1.jsonl").discard()

    def has_no_marker(self, name: str) -> bool:
        return self.no_marker

    def examine_again(self, name: str) -> None:
        self.examined_again.append(name)


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreExecutor]:
    async def at_once(wait_s: float) -> None:
        return

    with executor(concurrency=2) as threads:
        monkeypatch.setattr(threads, "pause", at_once)
        yield threads


def finished(**changed: Any) -> Finished:
    return replace(Finished(NAME, "v1", 10, None, "a", Node(0, 1), 1.8e9, None, (), {}), **changed)


async def run(context: UploadContext, versions: Versions, checkpoint: Finished | None = None) -> Tracked:
    """Run one job to its end."""
    tracked = context.catalog.finished(checkpoint or finished(), held=True)
    nothing_early: Any = None
    queue = Queue(context.catalog, nothing_early, context.flush)
    active = queue.active[tracked.name] = Active(tracked)
    check = PostCommitCheck(context.catalog, context.committer, context.deadline)
    await UploadJob(context, versions, queue, check, active).run()
    assert not queue.active
    assert context.news.is_set()
    return tracked


async def test_what_meets_no_trouble_is_committed_and_let_go(running: StoreExecutor, tmp_path: Path) -> None:
    store, versions = MemoryStore(), Versions(tmp_path)
    tracked = await run(uploads(store, running), versions)
    assert tracked.state is State.COMMITTED
    assert store.get(keys.commit(NAME))
    assert versions.let_go_of == ["v1"]


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), asyncio.CancelledError()])
async def test_what_is_durable_is_let_go_whatever_happens_then(
    error: BaseException, running: StoreExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its links held the space of a checkpoint that the trainer had deleted, until the sidecar ended."""
    context, versions = uploads(MemoryStore(), running), Versions(tmp_path)

    async def journal(checkpoint: Finished) -> Journal:
        raise error

    monkeypatch.setattr(versions, "journal", journal)
    with suppress(RuntimeError, asyncio.CancelledError):
        await run(context, versions)
    assert [tracked.state for tracked in context.catalog.all()] == [State.COMMITTED]
    assert versions.let_go_of == ["v1"]


@pytest.mark.parametrize(
    "error",
    [
        Outdated("committed meanwhile"),
        StoreError("away"),
        NotFound("k"),
        OSError(5, "disk"),
        UnreadableFile("model: disk"),
    ],
)
async def test_what_may_pass_is_tried_again_with_its_reason(error: Exception, running: StoreExecutor, tmp_path: Path) -> None:
    versions = Versions(tmp_path, error)
    tracked = await run(uploads(MemoryStore(), running), versions)
    assert tracked.state is State.FINISHED
    assert tracked.reason is not None
    assert str(error) in tracked.reason
    assert not versions.let_go_of


async def test_what_disappeared_is_lost_and_let_go(running: StoreExecutor, tmp_path: Path) -> None:
    versions = Versions(tmp_path, CheckpointRejected("its files disappeared"))
    tracked = await run(uploads(MemoryStore(), running), versions)
    assert (tracked.state, tracked.reason) == (State.LOST, "its files disappeared")
    assert versions.let_go_of == ["v1"]


async def test_a_file_that_no_store_takes_is_rejected_before_anything_is_asked(running: StoreExecutor, tmp_path: Path) -> None:
    store = MemoryStore()
    too_large = FoundFile("model", largest_file_bytes(store.probe().max_parts) + 1, 0, 0)
    tracked = await run(uploads(store, running), Versions(tmp_path), finished(files=(too_large,)))
    assert tracked.state is State.REJECTED
    assert "at most" in (tracked.reason or "")


@pytest.mark.parametrize(
    ("module", "limit", "reason"),
    [
        (committer, "MAX_DOCUMENT_BYTES", "the manifest of its 0 files has .* bytes, the maximum is 1: save fewer and larger"),
        (manifest, "MAX_MANIFESTS_BYTES", "its manifests have .* bytes, the maximum is 1: save fewer and larger files"),
    ],
)
async def test_what_no_reader_would_take_is_rejected_with_the_next_step_and_let_go(
    module: ModuleType, limit: str, reason: str, running: StoreExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was lost, as if its files had disappeared, or it waited for its commit for ever."""
    monkeypatch.setattr(module, limit, 1)
    store, versions = MemoryStore(), Versions(tmp_path)
    tracked = await run(uploads(store, running), versions)
    assert tracked.state is State.REJECTED
    assert re.match(reason, tracked.reason or "")
    assert versions.let_go_of == ["v1"]
    assert keys.commit(NAME) not in {stored.key for stored in store.list("")}


async def test_an_exception_that_nothing_expects_is_reported_and_delays_that_checkpoint_alone(
    running: StoreExecutor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended the uploads of all checkpoints, again in each second."""
    context = replace(uploads(MemoryStore(), running), raises_defects=False)
    tracked = await run(context, Versions(tmp_path, ValueError("a bug")))
    assert tracked.state is State.FINISHED
    assert "a bug; failed 1 times, tried again after" in (tracked.reason or "")
    assert "this is a defect of the sidecar: report it" in (tracked.reason or "")
    assert "upload_defect" in capsys.readouterr().out
    other = await run(context, Versions(tmp_path), finished(name="checkpoint-5", step=5))
    assert other.state is State.COMMITTED


@pytest.mark.parametrize("no_marker", [True, False])
async def test_files_that_changed_are_looked_at_again_unless_the_marker_is_gone(
    no_marker: bool, running: StoreExecutor, tmp_path: Path
) -> None:
    versions = Versions(tmp_path, CheckpointChanged("model"), no_marker=no_marker)
    context = uploads(MemoryStore(), running)
    tracked = await run(context, versions)
    assert tracked.state is (State.LOST if no_marker else State.FINISHED)
    assert context.catalog.is_replaced(tracked) is not no_marker
    assert versions.examined_again == ([] if no_marker else [NAME])
    assert "v1" in versions.let_go_of


async def test_unfinished_uploads_of_files_that_changed_are_aborted_and_a_new_upload_of_them_is_left_alone(
    running: StoreExecutor, tmp_path: Path
) -> None:
    """Their parts stayed in the store for a day; and the links of a version that was taken again could be removed."""
    store, versions = MemoryStore(), Versions(tmp_path, CheckpointChanged("model"))
    upload_id = store.begin_upload(f"{NAME}/model")
    journal = Journal(Folder(tmp_path) / f"{NAME}@1.jsonl")
    journal.begun("model", "s", upload_id=upload_id, key=f"{NAME}/model", part_bytes=5)
    journal.close()
    await run(uploads(store, running), versions)
    assert not list(store.pending_uploads(""))
    assert versions.examined_again == [NAME]
    assert versions.let_go_of == ["v1"]


async def test_what_is_given_up_while_its_journal_is_read_is_not_queued_again(
    running: StoreExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of the process that ended the uploader, with a stack trace in the log."""
    context, versions = uploads(MemoryStore(), running), Versions(tmp_path)
    tracked = context.catalog.finished(finished(), held=True)
    nothing_early: Any = None
    queue = Queue(context.catalog, nothing_early, context.flush)
    check = PostCommitCheck(context.catalog, context.committer, context.deadline)
    job = UploadJob(context, versions, queue, check, Active(tracked))
    for state in (State.UPLOADING, State.UPLOADED):
        context.catalog.move(tracked, state)

    async def send_again(*args: Any, **kwargs: Any) -> Reupload:
        return Reupload({}, "the manifest is missing")

    async def journal(checkpoint: Finished) -> Journal:
        context.catalog.move(tracked, State.GIVEN_UP, reason="the deadline passed first")
        return Journal(Folder(tmp_path) / f"{NAME}@1.jsonl")

    monkeypatch.setattr(context.committer, "try_commit", send_again)
    monkeypatch.setattr(versions, "journal", journal)
    await job.commit()
    assert tracked.state is State.GIVEN_UP


async def test_a_checkpoint_of_this_pod_that_was_downloaded_is_durable_only_where_its_commit_stands(
    running: StoreExecutor, tmp_path: Path
) -> None:
    store = MemoryStore()
    gone = await run(uploads(store, running), Versions(tmp_path), finished(meta={META_RESTORED: "another"}))
    assert gone.state is State.SUPERSEDED
    context = uploads(store, running)
    await run(context, Versions(tmp_path))
    there = await context.committer.stored_commit(NAME)
    assert there is not None
    known = await run(uploads(store, running), Versions(tmp_path), finished(meta={META_RESTORED: there.crc64nvme}))
    assert known.state is State.COMMITTED


async def test_an_objection_is_waited_for_and_said(
    running: StoreExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objections, said = ["another job writes here", None], []

    async def reason_not_to_upload(self: LastingPod, node: Node | None, attempt: str, **_: bool) -> str | None:
        return objections.pop(0)

    async def sleep(wait_s: float) -> None:
        said.append(tracked_by(context).reason)

    monkeypatch.setattr(LastingPod, "reason_not_to_upload", reason_not_to_upload)
    context = uploads(MemoryStore(), running)
    context = replace(context, clock=replace(context.clock, sleep=sleep))
    tracked = await run(context, Versions(tmp_path))
    assert said == ["another job writes here"]
    assert tracked.state is State.COMMITTED


def tracked_by(context: UploadContext) -> Tracked:
    tracked = context.catalog.get(NAME)
    assert tracked is not None
    return tracked


class _Interrupted(MemoryStore):
    """Something happens to the checkpoint while a request for a key is answered."""

    def __init__(self, request: str, key: str) -> None:
        super().__init__()
        self.request = request, key
        self.meanwhile: Callable[[], None] = lambda: None

    def put(self, key: str, content: bytes, *, only_if_absent: bool = False) -> Stored:
        if self.request == ("put", key):
            self.meanwhile()
        return super().put(key, content, only_if_absent=only_if_absent)

    def get(self, key: str, *, most_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        if self.request == ("get", key):
            self.meanwhile()
        return super().get(key, most_bytes=most_bytes)


def _moves(context: UploadContext, state: State) -> None:
    tracked = context.catalog.get(NAME)
    assert tracked is not None
    context.catalog.move(tracked, state, reason="meanwhile")


async def test_superseded_while_its_manifest_is_published_it_stays_superseded(running: StoreExecutor, tmp_path: Path) -> None:
    """It raised an assertion, which ended all uploads of the pod for a second."""
    store = _Interrupted("put", keys.manifest(NAME, "a", Node(0, 1)))
    context = uploads(store, running)
    store.meanwhile = lambda: _moves(context, State.SUPERSEDED)
    tracked = await run(context, Versions(tmp_path))
    assert (tracked.state, tracked.reason) == (State.SUPERSEDED, "meanwhile")
    with pytest.raises(NotFound):
        MemoryStore.get(store, keys.commit(NAME))


async def test_a_downloaded_one_that_is_deleted_while_its_commit_is_read_stays_lost(
    running: StoreExecutor, tmp_path: Path
) -> None:
    store = _Interrupted("get", keys.commit(NAME))
    await run(uploads(store, running), Versions(tmp_path))
    crc = checksum.text_of(MemoryStore.get(store, keys.commit(NAME)))
    context = uploads(store, running)
    store.meanwhile = lambda: _moves(context, State.LOST)
    tracked = await run(context, Versions(tmp_path), finished(meta={META_RESTORED: crc}))
    assert tracked.state is State.LOST


async def test_a_version_that_is_superseded_while_the_lease_is_read_keeps_that_reason(
    running: StoreExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was superseded a second time, for the reason why it was not sent."""

    async def reason_not_to_upload(self: LastingPod, node: Node | None, attempt: str, **_: bool) -> str | None:
        _moves(context, State.SUPERSEDED)
        return "another job writes here"

    monkeypatch.setattr(LastingPod, "reason_not_to_upload", reason_not_to_upload)
    context = uploads(MemoryStore(), running)
    tracked = await run(context, Versions(tmp_path))
    assert (tracked.state, tracked.reason) == (State.SUPERSEDED, "meanwhile")
