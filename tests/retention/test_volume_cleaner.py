"""What retention may delete, in the moment in which it does."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sidecar.core.format.found_checkpoint import Finished
from sidecar.core.lifecycle.states import State
from sidecar.core.schedule.order import superseded
from sidecar.daemon.services import Services
from sidecar.download.request import ResumeState
from sidecar.volume.opener import Place
from tests.catalog.test_volume_trouble import new_life
from tests.download.committed import DamagedWay, commit_step
from tests.download.test_unusable_steps import runtime_on
from tests.process.sidecar_process import contents, write_checkpoint


async def durable(services: Services, *steps: int) -> None:
    for step in steps:
        write_checkpoint(services.settings.dir, f"checkpoint-{step}", {"m": b"v1"}, {})
    await services.scanner.scan()
    for step in steps:
        tracked = services.catalog.get(f"checkpoint-{step}")
        assert tracked
        services.catalog.durable(tracked, at_s=time.time())


def on_volume(services: Services) -> set[str]:
    return set(services.volume.names())


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"CKPT_KEEP_LOCAL": "2"}, {"checkpoint-20", "checkpoint-30"}),
        ({}, {"checkpoint-20", "checkpoint-30"}),
        ({"CKPT_KEEP_STORE": "1"}, {"checkpoint-30"}),
        ({"CKPT_KEEP_STORE": "9"}, {"checkpoint-20", "checkpoint-30"}),
        ({"CKPT_KEEP_STORE": "1", "CKPT_KEEP_LOCAL": "2"}, {"checkpoint-20", "checkpoint-30"}),
    ],
)
def test_what_is_durable_and_not_to_be_kept_goes(settings: dict[str, str], kept: set[str], tmp_path: Path) -> None:
    async def scenario() -> None:
        services = new_life(tmp_path / "volume", **settings)
        await durable(services, 10, 20, 30)
        await services.volume_cleaner.clean_volume()
        assert on_volume(services) == kept

    asyncio.run(scenario())


def test_room_is_made_of_what_is_durable_oldest_first_and_of_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        services = new_life(tmp_path / "volume", CKPT_KEEP_LOCAL="9")
        await durable(services, 10, 20)
        write_checkpoint(tmp_path / "volume", "checkpoint-30", {"m": b"v1"}, {})
        write_checkpoint(tmp_path / "volume", "checkpoint-5", {"m": b"v1"}, {"meta": {"owner": "script"}})
        await services.scanner.scan()
        own = services.catalog.get("checkpoint-5")
        assert own
        services.catalog.durable(own, at_s=time.time())
        cleaner = services.volume_cleaner
        monkeypatch.setattr(services.volume, "free_bytes", lambda: 100)
        assert await cleaner.make_room(100) == []
        assert await cleaner.make_room(101) == ["checkpoint-10"]
        assert await cleaner.make_room(10_000) == ["checkpoint-20"], "also the newest: it is in the store"
        assert on_volume(services) == {"checkpoint-5", "checkpoint-30"}

    asyncio.run(scenario())


async def rotated(services: Services) -> None:
    """Have three checkpoints that are not durable, of which the trainer has deleted the first two."""
    for step in (10, 20, 30):
        write_checkpoint(services.settings.dir, f"checkpoint-{step}", {"m": b"v1"}, {})
    await services.scanner.scan()
    for step in (10, 20):
        shutil.rmtree(services.settings.dir / f"checkpoint-{step}")


def states(services: Services) -> list[State]:
    return [tracked.state for tracked in sorted(services.catalog.all(), key=lambda tracked: tracked.name)]


def free_by_releases(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a volume have as many free bytes as checkpoints were given up, times their size."""
    monkeypatch.setattr(services.volume, "free_bytes", lambda: 2 * states(services).count(State.SUPERSEDED))


async def test_the_newest_checkpoint_is_not_given_up_because_the_clock_was_set_back_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = new_life(tmp_path / "volume")
    for step, at_s in ((10, 1.8e9), (20, 1.8e9 + 60), (30, 1.8e9 - 9000)):
        folder = write_checkpoint(services.settings.dir, f"checkpoint-{step}", {"m": b"v1"}, {"attempt": "a"})
        for path in folder.iterdir():
            os.utime(path, (at_s, at_s))
    await services.scanner.scan()
    for step in (10, 20, 30):
        shutil.rmtree(services.settings.dir / f"checkpoint-{step}")
    free_by_releases(services, monkeypatch)
    assert await services.volume_cleaner.make_room(2) == ["checkpoint-10"]
    assert await services.volume_cleaner.make_room(4) == [], "either of the others may be the newest"
    assert states(services) == [State.SUPERSEDED, State.FINISHED, State.FINISHED]


def test_a_checkpoint_whose_directory_cannot_be_read_is_not_taken_for_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Place.status

    def status(place: Place) -> os.stat_result:
        if place.name == "checkpoint-10":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(place)

    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        await rotated(services)
        free_by_releases(services, monkeypatch)
        monkeypatch.setattr(Place, "status", status)
        assert await services.volume_cleaner.make_room(2) == ["checkpoint-20"]
        assert states(services) == [State.FINISHED, State.SUPERSEDED, State.FINISHED]

    asyncio.run(scenario())


def test_two_who_need_space_at_the_same_time_release_no_more_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        await rotated(services)
        free_by_releases(services, monkeypatch)
        released = await asyncio.gather(services.volume_cleaner.make_room(2), services.volume_cleaner.make_room(2))
        assert released == [["checkpoint-10"], []]

    asyncio.run(scenario())


def test_what_was_uploaded_after_the_plan_was_made_is_not_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        await rotated(services)
        monkeypatch.setattr(services.volume, "free_bytes", lambda: 0)
        real, other = services.volume.pins.release, services.catalog.get("checkpoint-20")

        def release(checkpoint: Finished) -> None:
            real(checkpoint)
            assert other
            other.state = State.UPLOADED

        monkeypatch.setattr(services.volume.pins, "release", release)
        assert await services.volume_cleaner.make_room(4) == ["checkpoint-10"]
        assert states(services) == [State.SUPERSEDED, State.UPLOADED, State.FINISHED]

    asyncio.run(scenario())


def test_a_version_that_nobody_has_seen_yet_is_not_deleted(tmp_path: Path) -> None:
    async def scenario() -> None:
        services = new_life(tmp_path / "volume", CKPT_KEEP_LOCAL="2")
        await durable(services, 10, 20, 30)
        (tmp_path / "volume/checkpoint-10/.complete").unlink()
        write_checkpoint(tmp_path / "volume", "checkpoint-10", {"m": b"v2"}, {"meta": {"second": True}})
        await services.volume_cleaner.clean_volume()
        assert "checkpoint-10" in on_volume(services)

    asyncio.run(scenario())


def test_what_is_handed_out_after_the_plan_was_made_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        services = new_life(tmp_path / "volume", CKPT_KEEP_LOCAL="1")
        await durable(services, 10, 20, 30)
        real, deleted = services.volume.delete, []

        def delete(name: str) -> None:
            [other] = {"checkpoint-10", "checkpoint-20"} - {name}
            monkeypatch.setattr(services.resume_service, "is_in_use", lambda name: name == other)
            deleted.append(name)
            real(name)

        monkeypatch.setattr(services.volume, "delete", delete)
        await services.volume_cleaner.clean_volume()
        assert len(deleted) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("asks_for", ["checkpoint-10", "latest"])
def test_a_request_uses_no_checkpoint_whose_deletion_has_begun(
    asks_for: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory vanished during the download, which was refused as "in the way"; or it was the answer (campaign 1028)."""

    async def scenario() -> None:
        store, begun, go_on = DamagedWay(), threading.Event(), threading.Event()
        commit_step(store, 10, {"m": b"v1"})
        services = runtime_on(store, tmp_path / "volume", CKPT_KEEP_LOCAL="1")
        folder = write_checkpoint(tmp_path / "volume", "checkpoint-10", {"m": b"v1"}, {"attempt": "a"})
        await services.scanner.scan()
        local = services.catalog.get("checkpoint-10")
        assert local is not None
        services.catalog.durable(local, at_s=time.time())
        real = services.volume.delete

        def delete(name: str) -> None:
            begun.set()
            go_on.wait(10)
            real(name)

        monkeypatch.setattr(services.volume, "delete", delete)
        monkeypatch.setattr(services.volume, "free_bytes", lambda: 100)
        deleting = asyncio.create_task(services.volume_cleaner.make_room(10_000))
        await asyncio.to_thread(begun.wait, 5)
        asked = services.resume_service.request(asks_for)
        early = await services.resume_service.progress(asked.id, timeout_s=0.5)
        monkeypatch.undo()
        go_on.set()
        assert await deleting == ["checkpoint-10"]
        status = await services.resume_service.progress(asked.id, timeout_s=10)
        assert early is not None
        assert early.state is ResumeState.CHOOSING
        assert status is not None
        assert (status.state, status.checkpoint, status.source) == (ResumeState.READY, "checkpoint-10", "store")
        assert contents(folder) == {"m": b"v1"}

    asyncio.run(scenario())


def test_after_a_run_went_back_the_newest_durable_one_is_what_it_saved_last(tmp_path: Path) -> None:
    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        await durable(services, 300, 400)
        write_checkpoint(tmp_path / "volume", "checkpoint-210", {"m": b"v2"}, {"attempt": "b"})
        write_checkpoint(tmp_path / "volume", "checkpoint-390", {"m": b"v1"}, {"created_at": "2026-01-01T00:00:00Z"})
        await services.scanner.scan()
        back, late = services.catalog.get("checkpoint-210"), services.catalog.get("checkpoint-390")
        assert back
        assert late
        assert services.catalog.is_after_newest_durable(back), "a durable 400 does not supersede it"
        assert not services.catalog.is_after_newest_durable(late)
        services.catalog.durable(late, at_s=time.time())
        assert services.catalog.newest_durable_step == 400
        services.catalog.durable(back, at_s=time.time())
        assert services.catalog.newest_durable_step == 210

    asyncio.run(scenario())


def test_what_an_earlier_attempt_committed_late_leaves_the_newest_of_the_present_one(tmp_path: Path) -> None:
    """In a job of several nodes, where the last part of an abandoned line may come after the commits of the present one."""

    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        for step, attempt in ((10, "c"), (20, "c"), (30, "b")):
            marker = {"attempt": f"20260101T00000{'bc'.index(attempt)}Z-{attempt}", "created_at": f"2026-01-01T00:00:{step}Z"}
            write_checkpoint(tmp_path / "volume", f"checkpoint-{step}", {"m": b"x"}, marker)
        await services.scanner.scan()
        for step in (20, 30, 10):
            tracked = services.catalog.get(f"checkpoint-{step}")
            assert tracked
            services.catalog.durable(tracked, at_s=time.time())
            assert services.catalog.newest_durable_step == 20

    asyncio.run(scenario())


def test_final_is_superseded_by_no_step_whatever_its_marker_says(tmp_path: Path) -> None:
    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        write_checkpoint(tmp_path / "volume", "final", {"m": b"best"}, {"step": 15})
        await services.scanner.scan()
        tracked = services.catalog.get("final")
        assert tracked
        assert superseded([tracked.waiting], newest_committed_step=20) == []

    asyncio.run(scenario())


def test_room_that_is_made_during_a_deletion_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two deletions of one checkpoint left every later request for it waiting for ever."""

    async def scenario() -> None:
        services = new_life(tmp_path / "volume", CKPT_KEEP_LOCAL="1")
        await durable(services, 10, 20, 30)
        real = services.volume.delete

        def delete(name: str) -> None:
            time.sleep(0.2)
            real(name)

        monkeypatch.setattr(services.volume, "delete", delete)
        cleaning = asyncio.create_task(services.volume_cleaner.clean_volume())
        await asyncio.sleep(0.05)
        assert await services.volume_cleaner.make_room(0) == []
        await cleaning
        assert on_volume(services) == {"checkpoint-30"}
        async with asyncio.timeout(1):
            for name in ("checkpoint-10", "checkpoint-20"):
                await services.resume_service._worker.local.deletion_ended(name)

    asyncio.run(scenario())


def test_what_cannot_be_deleted_does_not_keep_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        services = new_life(tmp_path / "volume", CKPT_KEEP_LOCAL="3")
        await durable(services, 10, 20, 30, 40, 50)
        real = services.volume.delete

        def delete(name: str) -> None:
            if name in ("checkpoint-20", "checkpoint-30"):
                raise PermissionError(13, "Permission denied")
            real(name)

        monkeypatch.setattr(services.volume, "delete", delete)
        with capture_logs() as logged:
            await services.volume_cleaner.clean_volume()
            await services.volume_cleaner.clean_volume()
            assert on_volume(services) == {f"checkpoint-{step}" for step in (20, 30, 40, 50)}
            await services.scanner.scan()
            monkeypatch.setattr(services.volume, "free_bytes", lambda: 100)
            made = await services.volume_cleaner.make_room(103)
            assert made == ["checkpoint-40", "checkpoint-50"], "in place of those that cannot be deleted"
        refusals = [line["checkpoint"] for line in logged if line["event"] == "local_checkpoint_not_deleted"]
        assert refusals == ["checkpoint-20", "checkpoint-30"], "each once"
        monkeypatch.undo()
        await services.volume_cleaner.clean_volume()
        assert "checkpoint-20" not in on_volume(services)

    asyncio.run(scenario())
