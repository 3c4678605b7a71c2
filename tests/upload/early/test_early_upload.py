"""Files that are sent before the marker."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from sidecar.core.format.found_checkpoint import Finished
from sidecar.core.format.key_limits import KeyLimits
from sidecar.core.lifecycle.states import State
from sidecar.errors import Fenced
from sidecar.lifecycle.deadline import Deadline
from sidecar.upload.context import UploadContext
from sidecar.upload.early import early_upload
from sidecar.upload.early.early_upload import EarlyUploads
from sidecar.volume.volume import Volume
from sidecar.volume.watch import Hints
from tests.store.memory import MemoryStore
from tests.upload.parts import LastingPod, executor, uploads
from trainer_hook.contract import Node


class _FencedPod(LastingPod):
    """A later pod of its job has taken the prefix over."""

    asked = 0

    async def reason_not_to_upload(self, node: Node | None, attempt: str, *, until_declared: bool = False) -> str | None:
        self.asked += 1
        raise Fenced("a later pod of this job has taken it over")


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Volume:
    """Return a volume on which the trainer writes checkpoint-10; small files count as large."""
    monkeypatch.setattr(early_upload, "LEAST_BYTES", 1)
    monkeypatch.setattr(early_upload, "POLL_S", 0.01)
    volume = Volume(tmp_path)
    volume.prepare()
    file = tmp_path / "checkpoint-10" / "model"
    file.parent.mkdir()
    file.write_bytes(b"weights")
    return volume


@asynccontextmanager
async def sending(context: UploadContext, volume: Volume) -> AsyncIterator[tuple[EarlyUploads, asyncio.Task[None]]]:
    """Send early; the file of checkpoint-10 is closed."""
    hints = Hints(volume)
    hints._closed[str(volume.root / "checkpoint-10" / "model")] = time.time() + 1
    early = EarlyUploads(context, volume, hints)
    task = asyncio.create_task(early.run())
    try:
        yield early, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_fenced_pod_sends_nothing_early_and_its_uploader_goes_on(volume: Volume) -> None:
    """``Fenced`` ended the uploader each time that a trainer of a fenced pod began a checkpoint."""
    store, fenced = MemoryStore(), _FencedPod()
    with executor(concurrency=2) as threads:
        async with sending(replace(uploads(store, threads), lease=fenced), volume) as (_, task):
            async with asyncio.timeout(5):
                while not fenced.asked and not task.done():
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            assert fenced.asked
            assert not task.done()
            assert not list(store.list(""))


@pytest.mark.parametrize("state", [State.FINISHED, State.UPLOADED])
async def test_a_step_that_is_written_again_is_not_sent_early_before_the_earlier_version_is_durable(
    volume: Volume, state: State
) -> None:
    """It replaced objects of a commit that was in flight."""
    store = MemoryStore()
    with executor(concurrency=2) as threads:
        context = uploads(store, threads)
        earlier = Finished("checkpoint-10", "v1", 10, None, "0", Node(), 1.8e9, None, (), {})
        tracked = context.catalog.finished(earlier, held=True)
        if state is State.UPLOADED:
            context.catalog.move(tracked, State.UPLOADING)
            context.catalog.move(tracked, state)
        async with sending(context, volume) as (early, _):
            await asyncio.sleep(0.1)
            assert not early.has("checkpoint-10")
            context.catalog.forget("checkpoint-10")  # nothing of it is awaited any more
            async with asyncio.timeout(5):
                while not early.has("checkpoint-10"):
                    await asyncio.sleep(0.01)


async def test_a_file_that_the_store_never_takes_is_not_sent_early(volume: Volume) -> None:
    """Its request was tried again for ever, and no other unfinished checkpoint was looked at any more."""
    store = MemoryStore()
    store.key_limits = KeyLimits(prefix_bytes=1010)
    with executor(concurrency=2) as threads:
        async with sending(uploads(store, threads), volume) as (early, task):
            await asyncio.sleep(0.2)
            assert not early.has("checkpoint-10")
            assert not task.done()
            assert not list(store.list(""))


async def test_a_volume_that_cannot_be_read_is_said_once(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was said up to 20 times a second."""
    polls = 0

    async def poll(watchers: asyncio.TaskGroup) -> None:
        nonlocal polls
        polls += 1
        if polls != 3:  # in between it can be read
            raise FileNotFoundError(2, "No such file or directory", "/checkpoints")

    with executor(concurrency=2) as threads, structlog.testing.capture_logs() as said:
        early = EarlyUploads(uploads(MemoryStore(), threads), volume, Hints(volume))
        monkeypatch.setattr(early, "_poll", poll)
        task = asyncio.create_task(early.run())
        async with asyncio.timeout(5):
            while polls < 8:
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert [line["event"] for line in said].count("unfinished_checkpoints_not_readable") == 2


async def test_a_remnant_of_an_earlier_trainer_process_is_not_expected_to_be_finished(volume: Volume) -> None:
    """The flush planned for its bytes first, and sent an older step before the just-in-time save while the trainer lived."""
    (volume.root / "checkpoint-20").mkdir()
    (volume.root / "checkpoint-20" / "model").write_bytes(b"half")
    for path in ("checkpoint-20/model", "checkpoint-20"):
        os.utime(volume.root / path, (1e9, 1e9))
    with executor(concurrency=2) as threads:
        deadline = Deadline()
        deadline.set(time.monotonic() + 30.0)
        async with sending(replace(uploads(MemoryStore(), threads), deadline=deadline), volume) as (early, _):
            async with asyncio.timeout(5):
                while len(early._known) < 2 or [w.waiting.name for w in early.writing(alive=True)] != ["checkpoint-10"]:
                    await asyncio.sleep(0.01)
            (volume.root / "checkpoint-20" / "model").write_bytes(b"it goes on")
            async with asyncio.timeout(5):
                while len(early.writing(alive=True)) != 2:
                    await asyncio.sleep(0.01)
