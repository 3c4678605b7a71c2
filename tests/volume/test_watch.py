"""What the kernel tells of the volume: of checkpoints that are being written, and of nothing that we do ourselves."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import structlog

from sidecar.volume import inotify
from sidecar.volume.volume import Volume
from sidecar.volume.watch import MOST_FOLLOWED, Hints
from tests.process.sidecar_process import write_checkpoint

MOMENT_S = 5.0
"""More than enough."""
SILENCE_S = 0.3


@pytest.fixture
async def hints(tmp_path: Path) -> AsyncIterator[Hints]:
    Volume(tmp_path).prepare()
    started = Hints(Volume(tmp_path))
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
    hints = Hints(Volume(tmp_path))
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
    for number in range(2 * MOST_FOLLOWED):
        (tmp_path / f"checkpoint-{number}").mkdir()
    await silence(hints)
    for number in range(2 * MOST_FOLLOWED):
        (tmp_path / f"checkpoint-{number}/model").write_bytes(b"x")
    await asyncio.sleep(SILENCE_S)
    assert len(hints.closed()) == MOST_FOLLOWED
    for number in range(2 * MOST_FOLLOWED):
        shutil.rmtree(tmp_path / f"checkpoint-{number}")
    await silence(hints)
    assert hints.closed() == {}
    (tmp_path / "checkpoint-7").mkdir()
    await silence(hints)
    (tmp_path / "checkpoint-7/model").write_bytes(b"x")
    await closed(hints, tmp_path / "checkpoint-7/model")


async def test_a_subfolder_of_another_name_is_followed_under_that_name(tmp_path: Path, hints: Hints) -> None:
    folder = tmp_path / "checkpoint-1"
    (folder / "before/deep").mkdir(parents=True)
    await silence(hints)
    (folder / "before").rename(folder / "after")
    await silence(hints)
    (folder / "after/deep/model").write_bytes(b"x")
    await closed(hints, folder / "after/deep/model")


async def test_a_link_is_neither_watched_nor_walked(tmp_path: Path) -> None:
    outside, volume = tmp_path / "outside", tmp_path / "volume"
    for place in (outside / "deep", volume):
        place.mkdir(parents=True)
    Volume(volume).prepare()
    (volume / "checkpoint-1").symlink_to(outside)
    (volume / "checkpoint-2").mkdir()
    (volume / "checkpoint-2/deep").symlink_to(outside / "deep")
    hints = Hints(Volume(volume))
    hints.start()
    hints.follow("checkpoint-1", "checkpoint-2")
    (volume / "checkpoint-2/more").symlink_to(outside)
    (volume / "checkpoint-3").symlink_to(outside)
    await silence(hints)
    for path in (outside / "model", outside / "deep/model", outside / ".complete"):
        path.write_bytes(b"x")
    (volume / "checkpoint-2/own").write_bytes(b"x")
    await closed(hints, volume / "checkpoint-2/own")
    assert list(hints.closed()) == [str(volume / "checkpoint-2/own")]
    assert not await is_woken(hints, within_s=SILENCE_S)
    hints.stop()


def refusing(number: int) -> Callable[..., int]:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return refuse


async def test_without_what_watching_needs_the_rescan_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Volume(tmp_path).prepare()
    for limited, number in (("init", errno.EMFILE), ("add_watch", errno.ENOSPC)):
        with monkeypatch.context() as patched, structlog.testing.capture_logs() as said:
            patched.setattr(inotify, limited, refusing(number))
            hints = Hints(Volume(tmp_path))
            hints.start()
            hints.follow("checkpoint-1")
            hints.forget("checkpoint-1")
            assert not await is_woken(hints, within_s=SILENCE_S)
            hints.stop()
        assert [event["event"] for event in said] == ["watch_falls_back_to_polling"]


async def test_a_checkpoint_that_cannot_be_watched_is_told_once_and_one_that_is_gone_is_not(
    tmp_path: Path, hints: Hints, monkeypatch: pytest.MonkeyPatch
) -> None:
    with structlog.testing.capture_logs() as said:
        hints.follow("checkpoint-1")
        assert said == []
        monkeypatch.setattr(inotify, "add_watch", refusing(errno.ENOSPC))
        for step in (2, 3):
            (tmp_path / f"checkpoint-{step}").mkdir()
            hints.follow(f"checkpoint-{step}")
    assert [event["event"] for event in said] == ["watch_falls_back_to_polling"]
    assert "max_user_watches" in said[0]["hint"]
