"""Trouble of the volume that passes: nothing that was finished is given up for it.

Inside one process, because nothing else makes a file system fail at a chosen call.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidecar import scanner
from sidecar.core.states import State
from sidecar.runtime import Runtime
from sidecar.settings import from_environment
from tests.process.sidecar_process import write_checkpoint

Failing = Callable[[str, int], None]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    """Let ``os.open`` fail for paths that contain a text; the empty text ends it."""
    real, now = os.open, ["", 0]

    def fail(text: str, number: int = errno.EMFILE) -> None:
        now[:] = [text, number]

    def opened(path: Any, *args: Any, **more: Any) -> int:
        if now[0] and str(now[0]) in str(path):
            raise OSError(now[1], os.strerror(int(now[1])), str(path))
        return real(path, *args, **more)

    monkeypatch.setattr(os, "open", opened)
    return fail


def new_life(volume: Path, **settings: str) -> Runtime:
    """The parts of a sidecar that starts on a volume."""
    volume.mkdir(exist_ok=True)
    runtime = Runtime(
        from_environment({"CKPT_DIR": str(volume), "CKPT_STORE": "file:///nowhere"} | settings), store_url="file:///nowhere"
    )
    runtime.volume.prepare()
    return runtime


def state_of(runtime: Runtime, name: str) -> State | None:
    tracked = runtime.catalog.get(name)
    return tracked.state if tracked else None


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE, errno.ENOMEM])
def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_looked_at_again(
    number: int, tmp_path: Path, failing: Failing
) -> None:
    async def scenario() -> None:
        runtime = new_life(tmp_path / "volume")
        write_checkpoint(tmp_path / "volume", "checkpoint-20", {"a": b"x"}, {})
        failing("checkpoint-20/.complete", number)
        await runtime.scanner.scan()
        assert runtime.scanner.unsettled, "it may be finished: nothing ends without it"
        failing("", 0)
        await runtime.scanner.scan()
        assert state_of(runtime, "checkpoint-20") is State.FINISHED
        assert not runtime.scanner.unsettled

    asyncio.run(scenario())


def test_trouble_that_does_not_pass_is_shown_and_holds_nothing_up(
    tmp_path: Path, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        runtime = new_life(tmp_path / "volume")
        write_checkpoint(tmp_path / "volume", "checkpoint-20", {"a": b"x"}, {})
        write_checkpoint(tmp_path / "volume", "checkpoint-10", {"a": b"x"}, {})
        failing("checkpoint-20/.complete", errno.EIO)
        monkeypatch.setattr(scanner, "TROUBLE_S", 0.0)
        await runtime.scanner.scan()
        assert not runtime.scanner.unsettled
        assert state_of(runtime, "checkpoint-10") is State.FINISHED
        assert state_of(runtime, "checkpoint-20") is State.REJECTED
        failing("", 0)
        await runtime.scanner.scan()
        assert state_of(runtime, "checkpoint-20") is State.FINISHED

    asyncio.run(scenario())


def test_a_marker_that_is_a_link_is_refused_for_good(tmp_path: Path) -> None:
    async def scenario() -> None:
        runtime = new_life(tmp_path / "volume")
        folder = write_checkpoint(tmp_path / "volume", "checkpoint-20", {"a": b"x"}, {})
        (folder / ".complete").rename(folder / "elsewhere")
        (folder / ".complete").symlink_to("elsewhere")
        await runtime.scanner.scan()
        assert state_of(runtime, "checkpoint-20") is State.REJECTED
        assert not runtime.scanner.unsettled

    asyncio.run(scenario())


def test_trouble_at_the_start_leaves_a_pin_that_holds_the_only_copy(tmp_path: Path, failing: Failing) -> None:
    async def scenario() -> None:
        volume = tmp_path / "volume"
        first = new_life(volume)
        folder = write_checkpoint(volume, "checkpoint-20", {"a": b"x"}, {})
        await first.scanner.scan()
        shutil.rmtree(folder)
        second = new_life(volume)
        failing("/.complete", errno.ENFILE)
        await second.scanner.take_over_pins()
        assert second.scanner.unsettled
        failing("", 0)
        await second.scanner.scan()
        assert state_of(second, "checkpoint-20") is State.FINISHED

    asyncio.run(scenario())


def test_trouble_while_a_held_file_is_opened_does_not_lose_its_checkpoint(tmp_path: Path, failing: Failing) -> None:
    async def scenario() -> None:
        runtime = new_life(tmp_path / "volume")
        write_checkpoint(tmp_path / "volume", "checkpoint-20", {"a": b"x"}, {})
        await runtime.scanner.scan()
        tracked = runtime.catalog.get("checkpoint-20")
        assert tracked
        assert tracked.checkpoint
        pin = runtime.volume.pin(tracked.checkpoint)
        failing("/pins/", errno.EMFILE)
        with pytest.raises(OSError, match="Too many open files"), pin.open("a"):
            pass

    asyncio.run(scenario())
