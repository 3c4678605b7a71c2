"""What the kernel tells of the volume: of checkpoints that are being written, and of nothing that we do ourselves."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog

from sidecar.volume.volume import Volume
from sidecar.volume.watch import MOST_FOLLOWED, Hints
from tests.process.sidecar_process import write_checkpoint

MOMENT_S = 5.0
"""More than enough."""
SILENCE_S = 0.3


@pytest.fixture
async def hints(tmp_path: Path) -> AsyncIterator[Hints]:
    Volume(tmp_path).prepare()
    started = Hints(tmp_path)
    started.start()
    yield started
    started.stop()


async def is_woken(hints: Hints, *, within_s: float = MOMENT_S) -> bool:
    began_s = asyncio.get_running_loop().time()
    await hints.wait(timeout_s=within_s)
    return asyncio.get_running_loop().time() - began_s < within_s


async def silence(hints: Hints) -> None:
    while await is_woken(hints, within_s=SILENCE_S):
        pass


def started_since(before: set[threading.Thread]) -> set[threading.Thread]:
    """Threads that were not there. One of an earlier test may still end meanwhile."""
    return set(threading.enumerate()) - before


async def all_ended(before: set[threading.Thread]) -> None:
    async with asyncio.timeout(MOMENT_S):
        while started_since(before):
            await asyncio.sleep(0.01)


async def closed(hints: Hints, path: Path) -> None:
    async with asyncio.timeout(MOMENT_S):
        while str(path) not in hints.closed():
            await asyncio.sleep(0.01)


async def test_a_marker_wakes_at_once_in_a_folder_that_was_there_in_a_new_one_and_in_one_that_is_made_anew(
    tmp_path: Path, hints: Hints
) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    await silence(hints)
    (tmp_path / "checkpoint-1/.complete").write_text("{}")
    assert await is_woken(hints)
    await silence(hints)
    write_checkpoint(tmp_path, "checkpoint-2", {"deep/er/model": b"x"})
    assert await is_woken(hints)
    for path in (".complete", "deep/er/model", "deep/er", "deep", "."):
        (Path.rmdir if (tmp_path / "checkpoint-2" / path).is_dir() else Path.unlink)(tmp_path / "checkpoint-2" / path)
    await silence(hints)
    (tmp_path / "checkpoint-2").mkdir()
    await silence(hints)
    (tmp_path / "checkpoint-2/.complete").write_text("{}")
    assert await is_woken(hints)


async def test_a_folder_that_gets_its_name_when_it_is_whole_wakes(tmp_path: Path, hints: Hints) -> None:
    (tmp_path / "tmp-1").mkdir()
    (tmp_path / "tmp-1/.complete").write_text("{}")
    await silence(hints)
    (tmp_path / "tmp-1").rename(tmp_path / "checkpoint-1")
    assert await is_woken(hints)


async def test_files_that_were_closed_after_writing_are_known_until_the_checkpoint_is_forgotten(
    tmp_path: Path, hints: Hints
) -> None:
    folder = tmp_path / "checkpoint-1"
    (folder / "deep").mkdir(parents=True)
    await silence(hints)
    for path in (folder / "model", folder / "deep/optimizer"):
        path.write_bytes(b"x")
        await closed(hints, path)
    hints.forget(folder.name)
    assert hints.closed() == {}
    (folder / "late").write_bytes(b"x")
    await asyncio.sleep(SILENCE_S)
    assert hints.closed() == {}
    hints.follow(folder.name)
    (folder / "later").write_bytes(b"x")
    await closed(hints, folder / "later")


async def test_what_was_being_written_before_the_start_is_watched(tmp_path: Path) -> None:
    Volume(tmp_path).prepare()
    (tmp_path / "checkpoint-1").mkdir()
    write_checkpoint(tmp_path, "checkpoint-2", {"model": b"x"})
    hints = Hints(tmp_path)
    hints.start()
    (tmp_path / "checkpoint-1/model").write_bytes(b"x")
    await closed(hints, tmp_path / "checkpoint-1/model")
    (tmp_path / "checkpoint-2/model").write_bytes(b"x")
    await asyncio.sleep(SILENCE_S)
    assert len(hints.closed()) == 1
    hints.stop()


async def test_what_we_write_ourselves_is_not_told(tmp_path: Path, hints: Hints) -> None:
    for place in (".ckpt/pins/checkpoint-1@x", ".ckpt/incoming/checkpoint-2"):
        (tmp_path / place).mkdir(parents=True)
        write_checkpoint(tmp_path, place, {"model": b"x"})
    assert not await is_woken(hints, within_s=SILENCE_S)
    assert hints.closed() == {}
    (tmp_path / ".ckpt/terminating").write_text("{}")
    assert await is_woken(hints)


async def test_so_many_are_watched_and_no_more_and_those_that_are_gone_make_room(tmp_path: Path, hints: Hints) -> None:
    before = set(threading.enumerate())
    for number in range(2 * MOST_FOLLOWED):
        (tmp_path / f"checkpoint-{number}").mkdir()
    await silence(hints)
    assert 0 < len(started_since(before)) <= MOST_FOLLOWED
    for number in range(2 * MOST_FOLLOWED):
        (tmp_path / f"checkpoint-{number}").rmdir()
    await silence(hints)
    await all_ended(before)
    (tmp_path / "checkpoint-7").mkdir()
    await silence(hints)
    (tmp_path / "checkpoint-7/model").write_bytes(b"x")
    await closed(hints, tmp_path / "checkpoint-7/model")


async def test_without_what_watching_needs_the_rescan_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Volume(tmp_path).prepare()
    before = set(threading.enumerate())
    for limited in ("inotify_init", "inotify_add_watch"):

        def refuse(*_: object, of: str = limited) -> int:
            ctypes.set_errno(errno.EMFILE if of == "inotify_init" else errno.ENOSPC)
            return -1

        with monkeypatch.context() as patched, structlog.testing.capture_logs() as said:
            patched.setattr(f"watchdog.observers.inotify_c.{limited}", refuse)
            hints = Hints(tmp_path)
            hints.start()
            hints.follow("checkpoint-1")
            hints.forget("checkpoint-1")
            assert not await is_woken(hints, within_s=SILENCE_S)
            hints.stop()
        assert [event["event"] for event in said] == ["watch_falls_back_to_polling"]
    await all_ended(before)


async def test_a_checkpoint_that_cannot_be_watched_is_told_once_and_one_that_is_gone_is_not(
    tmp_path: Path, hints: Hints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        ctypes.set_errno(errno.ENOSPC)
        return -1

    with structlog.testing.capture_logs() as said:
        hints.follow("checkpoint-1")
        assert said == []
        monkeypatch.setattr("watchdog.observers.inotify_c.inotify_add_watch", refuse)
        for step in (2, 3):
            (tmp_path / f"checkpoint-{step}").mkdir()
            hints.follow(f"checkpoint-{step}")
    assert [event["event"] for event in said] == ["watch_falls_back_to_polling"]
    assert "max_user_watches" in said[0]["hint"]
