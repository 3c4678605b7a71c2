"""What the uploader does beside its jobs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sidecar.core.commit.commit import manifest_of
from sidecar.core.format import manifest
from sidecar.core.lifecycle.states import State
from sidecar.upload.commit.committer import Committer
from sidecar.upload.schedule.queue import Active
from sidecar.upload.uploader import Uploader
from tests.store.memory import MemoryStore
from tests.upload.parts import DistantStore, executor, found, transfer, uploads, written
from tests.upload.test_job import NAME, Versions, finished
from trainer_hook.contract import Node


@pytest.mark.parametrize("later_attempt", [False, True])
async def test_a_step_of_an_abandoned_attempt_is_not_waited_for(tmp_path: Path, later_attempt: bool) -> None:
    """A lost node had not finished it, the next attempt resumed from an older step, and the last flush waited for it."""
    versions, nothing_early = Versions(tmp_path), None
    early: Any = nothing_early
    with executor(concurrency=2) as threads:
        context = uploads(MemoryStore(), threads)
        uploader = Uploader(context, versions, early, skip_superseded=False)
        waiting = context.catalog.finished(finished(name="checkpoint-30", step=30, node=Node(0, 2)), held=True)
        for state in (State.UPLOADING, State.UPLOADED):
            context.catalog.move(waiting, state)
        assert waiting.checkpoint is not None
        await context.committer.publish_manifest(manifest_of(waiting.checkpoint, []))
        attempt = "b" if later_attempt else "a"
        newer = context.catalog.finished(
            finished(name="checkpoint-20", step=20, created_at_s=1.9e9, attempt=attempt), held=True
        )
        context.catalog.durable(newer, at_s=1.9e9)
        async with asyncio.TaskGroup() as tasks:
            await uploader._commit_or_supersede(waiting)
            uploader._discard_replaced(tasks)
        assert waiting.state is (State.SUPERSEDED if later_attempt else State.UPLOADED)
        assert versions.let_go_of == (["v1"] if later_attempt else [])


async def test_a_step_whose_parts_are_together_more_than_a_reader_takes_is_rejected_and_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node waited for the commit of such a step until its pod ended."""
    monkeypatch.setattr(manifest, "MAX_MANIFESTS_BYTES", 1)
    versions, nothing_early = Versions(tmp_path), None
    early: Any = nothing_early
    with executor(concurrency=2) as threads:
        context = uploads(MemoryStore(), threads)
        uploader = Uploader(context, versions, early, skip_superseded=False)
        ours, theirs = (finished(node=Node(index, 2)) for index in (0, 1))
        waiting = context.catalog.finished(ours, held=True)
        for state in (State.UPLOADING, State.UPLOADED):
            context.catalog.move(waiting, state)
        for part in (ours, theirs):
            await Committer(context.store, threads).publish_manifest(manifest_of(part, []))
        await uploader._commit_or_supersede(waiting)
        assert waiting.state is State.REJECTED
        assert (waiting.reason or "").endswith("the maximum is 1: save fewer and larger files")
        assert versions.let_go_of == ["v1"]


async def test_a_version_that_is_superseded_is_let_go_while_an_earlier_one_is_still_being_sent(tmp_path: Path) -> None:
    """Its links and its journal stayed on the volume until the pod ended."""
    versions, nothing_early = Versions(tmp_path), None
    early: Any = nothing_early
    with executor(concurrency=2) as threads:
        context = uploads(MemoryStore(), threads)
        uploader = Uploader(context, versions, early, skip_superseded=True)
        earlier = context.catalog.finished(finished(), held=True)
        uploader._queue.active[NAME] = Active(earlier)
        replacing = context.catalog.finished(finished(version="v2"), held=True)
        newer = context.catalog.finished(finished(name="checkpoint-20", step=20, created_at_s=1.9e9), held=True)
        context.catalog.durable(newer, at_s=1.9e9)
        async with asyncio.TaskGroup() as tasks:
            uploader._drop_superseded()
            uploader._discard_replaced(tasks)
        assert replacing.state is State.SUPERSEDED
        assert versions.let_go_of == ["v2"]


async def test_after_a_failure_of_the_uploader_nothing_is_sent_twice(tmp_path: Path) -> None:
    """The uploads of the run before went on to their end beside those of the next one, in the same multipart uploads."""

    class FailingEarly:
        def transfers(self) -> list[tuple[Any, Any]]:
            return []

        async def run(self) -> None:
            raise RuntimeError("a bug")

    early: Any = FailingEarly()
    store, path = DistantStore(), written(tmp_path / NAME, parts=10)
    with executor(concurrency=2) as threads:
        context = uploads(store, threads)
        uploader = Uploader(context, Versions(tmp_path), early, skip_superseded=False)
        sending = transfer(path, store, threads, journal=tmp_path / "journal")
        sending.add([found(path)])
        tracked = context.catalog.finished(finished(), held=True)
        uploader._queue.active[NAME] = Active(tracked, sending)
        uploader._dispatcher.reorder([sending])
        while len(store.came) < 2:
            await asyncio.sleep(0.01)
        context.catalog.move(tracked, State.LOST)  # for the next run there is nothing to do
        with pytest.raises(RuntimeError, match="a bug"):
            await uploader.run()
        store.reached.set()
        async with asyncio.timeout(10):
            await sending.finished()
        assert len(store.came) == 2
        assert not list(store.list(""))
        sending.journal.close()
