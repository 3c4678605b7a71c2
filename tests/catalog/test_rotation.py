"""Rotations at work while the volume is scanned: a checkpoint is taken whole or not at all."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from pathlib import Path

import pytest

from sidecar.catalog import scanner
from sidecar.core.format.found_checkpoint import Finished
from sidecar.core.lifecycle.states import State
from sidecar.volume.pins import Pin
from tests.catalog.test_volume_trouble import new_life, state_of

NAME = "checkpoint-20"


def checkpoint(volume: Path, marker: str) -> Path:
    """A finished checkpoint that is some time old."""
    folder = volume / NAME
    (folder / "deep/er").mkdir(parents=True)
    for path in ("a.pt", "deep/b.pt", "deep/er/c.pt"):
        (folder / path).write_bytes(b"x")
    (folder / ".complete.tmp").write_text(marker)
    (folder / ".complete.tmp").rename(folder / ".complete")
    time.sleep(0.1)
    return folder


@pytest.mark.parametrize("gone", ["a.pt", "deep/b.pt", "deep/er/c.pt", "deep"])
@pytest.mark.parametrize("marker", ["", "{}", '{"format": 1, "step": 20}'])
def test_a_checkpoint_is_not_taken_while_a_rotation_deletes_it(tmp_path: Path, marker: str, gone: str) -> None:
    """It was committed without the files that were deleted first: nothing else says what a bare marker belongs to."""

    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        folder = checkpoint(tmp_path / "volume", marker)
        shutil.rmtree(folder / gone) if (folder / gone).is_dir() else (folder / gone).unlink()
        for _ in range(3):  # the marker is empty for longer than SETTLE_S, too
            await services.scanner.scan()
            assert state_of(services, NAME) is None
            assert services.scanner.unsettled
            await asyncio.sleep(scanner.SETTLE_S / 2)
        shutil.rmtree(folder)
        await services.scanner.scan()
        assert state_of(services, NAME) is None
        assert not services.scanner.unsettled

    asyncio.run(scenario())


@pytest.mark.parametrize("marker", ["", "{}"])
def test_what_stays_as_it_is_after_a_change_is_taken(tmp_path: Path, marker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a file system that gives a directory the present time at each look."""

    async def scenario() -> None:
        monkeypatch.setattr(scanner, "DELETION_S", 0.5)
        services = new_life(tmp_path / "volume")
        folder = checkpoint(tmp_path / "volume", marker)
        (folder / "made-later").touch()
        (folder / "made-later").unlink()
        await services.scanner.scan()
        assert state_of(services, NAME) is None
        await asyncio.sleep(0.6)
        (folder / "deep").touch()
        await services.scanner.scan()
        assert state_of(services, NAME) is State.FINISHED
        assert not services.scanner.unsettled

    asyncio.run(scenario())


@pytest.mark.parametrize("marker", ["", "{}"])
def test_a_checkpoint_is_not_taken_while_it_is_copied_with_its_times(tmp_path: Path, marker: str) -> None:
    """`cp -a` into a volume in use: it was committed without what came after its marker."""

    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        folder, past_s = tmp_path / "volume" / NAME, time.time() - 3600
        folder.mkdir()
        for path in ("a.pt", ".complete"):
            (folder / path).write_text("x" if path == "a.pt" else marker)
            os.utime(folder / path, (past_s, past_s))
        for _ in range(3):
            await services.scanner.scan()
            assert state_of(services, NAME) is None
            await asyncio.sleep(scanner.SETTLE_S / 2)
        (folder / "b.pt").write_text("x")
        for path in (folder / "b.pt", folder):
            os.utime(path, (past_s, past_s))
        for _ in range(2):
            await services.scanner.scan()
            await asyncio.sleep(scanner.SETTLE_S)
        tracked = services.catalog.get(NAME)
        assert tracked is not None
        assert tracked.checkpoint is not None
        assert [file.path for file in tracked.checkpoint.files] == ["a.pt", "b.pt"]

    asyncio.run(scenario())


def test_a_marker_that_lists_its_files_needs_no_second_look(tmp_path: Path) -> None:
    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        folder = checkpoint(tmp_path / "volume", '{"format": 1, "files": [{"path": "a.pt", "size_bytes": 1}]}')
        (folder / "deep/b.pt").unlink()
        await services.scanner.scan()
        assert state_of(services, NAME) is State.FINISHED

    asyncio.run(scenario())


@pytest.mark.parametrize("marker", ["{}", '{"format": 1, "step": 20}'])
def test_a_file_that_is_written_after_the_marker_is_no_rotation(tmp_path: Path, marker: str) -> None:
    """A log that grows beside the checkpoint kept it from being judged, and a resume waited for ever."""

    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        folder = checkpoint(tmp_path / "volume", marker)
        (folder / "train.log").write_text("loss: 1")
        await services.scanner.scan()
        assert state_of(services, NAME) is State.REJECTED
        assert not services.scanner.unsettled

    asyncio.run(scenario())


def test_what_was_pinned_before_a_restart_is_not_examined_for_ever(tmp_path: Path) -> None:
    """A scan had seen its empty marker just before the pin was taken, and nothing looked at it again: exit code 3."""

    async def scenario() -> None:
        first = new_life(tmp_path / "volume")
        checkpoint(tmp_path / "volume", "")
        while state_of(first, NAME) is None:
            await first.scanner.scan()
            await asyncio.sleep(scanner.SETTLE_S)
        second = new_life(tmp_path / "volume")
        await second.scanner.scan()
        assert second.scanner.unsettled
        assert second.scanner.unsettled_names() == [NAME]
        await second.scanner.take_over_pins()
        assert state_of(second, NAME) is State.FINISHED
        assert not second.scanner.unsettled

    asyncio.run(scenario())


@pytest.mark.parametrize(("deleted", "state"), [(".complete", None), ("", State.LOST)])
def test_a_marker_that_is_removed_before_the_files_are_held_is_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deleted: str, state: State | None
) -> None:
    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        folder = checkpoint(tmp_path / "volume", '{"format": 1}')
        hold = services.volume.pins.hold

        def late(finished: Finished) -> Pin:
            (folder / ".complete").unlink() if deleted else shutil.rmtree(folder)
            return hold(finished)

        monkeypatch.setattr(services.volume.pins, "hold", late)
        while (folder / ".complete").exists():
            await services.scanner.scan()
            await asyncio.sleep(scanner.SETTLE_S)
        assert state_of(services, NAME) is state

    asyncio.run(scenario())
