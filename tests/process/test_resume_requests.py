"""Requests that replace each other, a store that goes away, and a volume whose checkpoints are not what they were."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.core import keys
from sidecar.core.layout import Share
from sidecar.core.manifest import Commit, Manifest, ManifestEntry, NodeOf
from sidecar.resume import resuming
from sidecar.resume.downloader import Downloader, Offer
from sidecar.resume.resuming import ResumeState
from sidecar.runtime import Runtime
from sidecar.store.memory import MemoryStore
from tests.process.sidecar_process import contents, sidecar, until, write_checkpoint
from tests.process.test_volume_trouble import new_life
from trainer_hook.contract import Node, step_of

WHOLE = {"model": b"A" * 100, "optimizer": b"B" * 100}


class SlowToEnd(Downloader):
    """A store of two steps, and downloads that end a while after they were cancelled."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(MemoryStore(), runtime.volume, runtime.transfers)
        self.under_way: list[str] = []
        self.most_under_way = 0
        self.fails_when_cancelled = False
        self.held = asyncio.Event()

    async def committed(self) -> list[str]:
        return ["checkpoint-20", "checkpoint-10"]

    async def commit(self, name: str) -> tuple[Commit, str] | None:
        entry = ManifestEntry(key=keys.manifest(name, "a", Node()), size_bytes=1, crc64nvme="0" * 16)
        commit = Commit(
            name=name,
            step=step_of(name),
            attempt="a",
            created_at=None,
            committed_at=None,
            reason=None,
            world_size=None,
            meta={},
            files=1,
            size_bytes=1,
            manifests=(entry,),
        )
        return commit, "0" * 16

    async def offer(self, commit: Commit, commit_crc: str, share: Share | None = None) -> Offer:
        return Offer(commit, commit_crc, (Manifest(name=commit.name, attempt="a", node=NodeOf(index=0, count=1), files=()),))

    async def download(self, offer: Offer, node: Node, on_progress: Callable[[int, int], None]) -> Path:
        self.under_way.append(offer.name)
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        try:
            await self.held.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.1)
            on_progress(1, 2)
            if self.fails_when_cancelled:
                raise OSError(28, "No space left on device") from None
            raise
        finally:
            self.under_way.remove(offer.name)
        return self._volume.root / offer.name


@pytest.mark.parametrize("fails", [False, True])
def test_a_request_begins_when_those_that_it_replaced_have_ended_and_only_it_answers(fails: bool, tmp_path: Path) -> None:
    async def scenario() -> None:
        runtime = new_life(tmp_path / "volume")
        downloader = SlowToEnd(runtime)
        downloader.fails_when_cancelled = fails
        runtime.resuming.opened(downloader)
        runtime.resuming.begin_early()
        while not downloader.under_way:
            await asyncio.sleep(0.01)
        runtime.resuming.request("latest", 0)
        await asyncio.sleep(0.01)
        runtime.resuming.request("checkpoint-10")
        assert downloader.under_way == ["checkpoint-20"], "the first one still ends"
        while downloader.under_way != ["checkpoint-10"]:
            assert runtime.resuming.status.state is ResumeState.CHOOSING
            assert runtime.resuming.status.done_bytes == 0
            await asyncio.sleep(0.01)
        downloader.held.set()
        answer = await runtime.resuming.progress(timeout_s=5)
        assert (answer.state, answer.checkpoint, answer.done_bytes) == (ResumeState.READY, "checkpoint-10", 0)
        assert downloader.most_under_way == 1

    asyncio.run(asyncio.wait_for(scenario(), 20))


class Away(SlowToEnd):
    async def committed(self) -> list[str]:
        await asyncio.Event().wait()
        return []


class Empty(SlowToEnd):
    async def committed(self) -> list[str]:
        return []


def test_what_was_downloaded_before_is_used_when_the_store_has_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        runtime = new_life(tmp_path / "volume")
        marker = {"attempt": "a", "meta": {"restored": "0123456789abcdef"}}
        write_checkpoint(tmp_path / "volume", "checkpoint-20", WHOLE, marker)
        runtime.resuming.opened(Empty(runtime))
        runtime.resuming.request()
        answer = await runtime.resuming.progress(timeout_s=5)
        assert (answer.state, answer.checkpoint, answer.source) == (ResumeState.READY, "checkpoint-20", "local")

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_what_was_downloaded_before_is_used_when_the_store_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(resuming, "LOCAL_PATIENCE_S", 0.05)
        runtime = new_life(tmp_path / "volume")
        marker = {"attempt": "a", "meta": {"restored": "0123456789abcdef", "loss": 1}}
        folder = write_checkpoint(tmp_path / "volume", "checkpoint-20", WHOLE, marker)
        runtime.resuming.opened(Away(runtime))
        runtime.resuming.request()
        answer = await runtime.resuming.progress(timeout_s=5)
        assert (answer.state, answer.checkpoint, answer.source) == (ResumeState.READY, "checkpoint-20", "local")
        assert answer.meta == {"loss": 1}
        (folder / "model").write_bytes(b"changed")
        runtime.resuming.request("latest", 0)
        answer = await runtime.resuming.progress(timeout_s=0.5)
        assert answer.state is ResumeState.CHOOSING, "one that was changed since is waited out"
        runtime.resuming.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))


@pytest.fixture
def store(tmp_path: Path) -> dict[str, str]:
    return {"CKPT_STORE": f"file://{tmp_path / 'store'}"}


@pytest.mark.parametrize("torn_by", ["a deletion", "a rewriting"])
def test_a_local_checkpoint_whose_files_changed_is_not_offered(torn_by: str, store: dict[str, str], tmp_path: Path) -> None:
    with sidecar(tmp_path / "volume", store) as running:
        running.ready()
        folder = write_checkpoint(running.volume, "checkpoint-20", WHOLE, {})
        running.committed("checkpoint-20")
        time.sleep(0.02)
        if torn_by == "a deletion":
            (folder / "optimizer").unlink()
        else:
            (folder / "model").write_bytes(b"half")
        answer = running.resume()
        assert (answer["state"], answer["source"]) == ("ready", "store")
        assert contents(folder) == WHOLE


def test_a_commit_made_anew_ends_the_quarantine_of_its_name(store: dict[str, str], tmp_path: Path) -> None:
    with sidecar(tmp_path / "old", store) as running:
        running.ready()
        write_checkpoint(running.volume, "checkpoint-1", {"a": b"xyz"}, {})
        running.committed("checkpoint-1")
    (tmp_path / "store/checkpoint-1/a").write_bytes(b"xyZ")
    with sidecar(tmp_path / "volume", store | {"CKPT_RESUME": "on-demand"}) as running:
        running.ready()
        assert running.resume()["state"] == "none"
        assert set(running.status()["quarantined"]) == {"checkpoint-1"}
        write_checkpoint(running.volume, "checkpoint-1", {"a": b"good"}, {})
        running.committed("checkpoint-1")
        until(lambda: running.status()["quarantined"] == {})
        running.kill()
    with sidecar(tmp_path / "volume", store | {"CKPT_RESUME": "off"}) as running:
        assert running.up().status()["quarantined"] == {}
