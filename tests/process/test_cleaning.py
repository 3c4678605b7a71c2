"""What retention may delete, in the moment in which it does."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sidecar.cleaner import Cleaner
from sidecar.core.order import superseded
from sidecar.resume.resuming import ResumeStatus
from sidecar.runtime import Runtime
from sidecar.store.memory import MemoryStore
from tests.process.sidecar_process import write_checkpoint
from tests.process.test_volume_trouble import new_life


async def durable(runtime: Runtime, *steps: int) -> None:
    for step in steps:
        write_checkpoint(runtime.settings.dir, f"checkpoint-{step}", {"m": b"v1"}, {})
    await runtime.scanner.scan()
    for step in steps:
        tracked = runtime.catalog.get(f"checkpoint-{step}")
        assert tracked
        runtime.catalog.durable(tracked, at_s=time.time())


def cleaner_of(runtime: Runtime) -> Cleaner:
    return Cleaner(
        settings=runtime.settings,
        store=MemoryStore(),
        volume=runtime.volume,
        catalog=runtime.catalog,
        transfers=runtime.transfers,
        resuming=runtime.resuming,
        events=runtime.events,
    )


def on_volume(runtime: Runtime) -> set[str]:
    return set(runtime.volume.names())


def test_what_is_durable_and_not_to_be_kept_goes(tmp_path: Path) -> None:
    async def scenario() -> None:
        runtime = new_life(tmp_path / "volume", CKPT_KEEP_LOCAL="2")
        await durable(runtime, 10, 20, 30)
        await cleaner_of(runtime).clean_volume()
        assert on_volume(runtime) == {"checkpoint-20", "checkpoint-30"}

    asyncio.run(scenario())


def test_room_is_made_of_what_is_durable_oldest_first_and_of_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        runtime = new_life(tmp_path / "volume", CKPT_KEEP_LOCAL="9")
        await durable(runtime, 10, 20)
        write_checkpoint(tmp_path / "volume", "checkpoint-30", {"m": b"v1"}, {})
        write_checkpoint(tmp_path / "volume", "checkpoint-5", {"m": b"v1"}, {"meta": {"owner": "script"}})
        await runtime.scanner.scan()
        own = runtime.catalog.get("checkpoint-5")
        assert own
        runtime.catalog.durable(own, at_s=time.time())
        cleaner = cleaner_of(runtime)
        monkeypatch.setattr(runtime.volume, "free_bytes", lambda: 100)
        assert await cleaner.make_room(100) == []
        assert await cleaner.make_room(101) == ["checkpoint-10"]
        assert await cleaner.make_room(10_000) == ["checkpoint-20"], "also the newest: it is in the store"
        assert on_volume(runtime) == {"checkpoint-5", "checkpoint-30"}

    asyncio.run(scenario())


def test_a_version_that_nobody_has_seen_yet_is_not_deleted(tmp_path: Path) -> None:
    async def scenario() -> None:
        runtime = new_life(tmp_path / "volume", CKPT_KEEP_LOCAL="2")
        await durable(runtime, 10, 20, 30)
        (tmp_path / "volume/checkpoint-10/.complete").unlink()
        write_checkpoint(tmp_path / "volume", "checkpoint-10", {"m": b"v2"}, {"meta": {"second": True}})
        await cleaner_of(runtime).clean_volume()
        assert "checkpoint-10" in on_volume(runtime)

    asyncio.run(scenario())


def test_what_is_handed_out_after_the_plan_was_made_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        runtime = new_life(tmp_path / "volume", CKPT_KEEP_LOCAL="1")
        await durable(runtime, 10, 20, 30)
        real, deleted = runtime.volume.delete, []

        def delete(name: str) -> None:
            [other] = {"checkpoint-10", "checkpoint-20"} - {name}
            handed_out = replace(ResumeStatus(), checkpoint=other)
            monkeypatch.setattr(runtime.resuming, "_status", handed_out)
            deleted.append(name)
            real(name)

        monkeypatch.setattr(runtime.volume, "delete", delete)
        await cleaner_of(runtime).clean_volume()
        assert len(deleted) == 1

    asyncio.run(scenario())


def test_final_is_superseded_by_no_step_whatever_its_marker_says(tmp_path: Path) -> None:
    async def scenario() -> None:
        runtime = new_life(tmp_path / "volume")
        write_checkpoint(tmp_path / "volume", "final", {"m": b"best"}, {"step": 15})
        await runtime.scanner.scan()
        tracked = runtime.catalog.get("final")
        assert tracked
        assert superseded([tracked.waiting], newest_committed_step=20) == []

    asyncio.run(scenario())
