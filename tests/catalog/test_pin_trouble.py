"""Trouble with pins: those of an earlier process are taken over, and none is forgotten."""

from __future__ import annotations

import asyncio
import errno
import shutil
from pathlib import Path

import pytest

from sidecar.catalog import scanner
from sidecar.core.lifecycle.states import State
from sidecar.daemon.services import Services
from tests.catalog.conftest import Failing
from tests.catalog.test_volume_trouble import new_life, state_of
from tests.process.sidecar_process import write_checkpoint
from trainer_hook.contract import PINS


@pytest.fixture
def only_a_pin(tmp_path: Path) -> Services:
    """A new sidecar on a volume with a pin that holds the only copy of checkpoint-20."""
    volume = tmp_path / "volume"
    folder = write_checkpoint(volume, "checkpoint-20", {"a": b"x"}, {})
    asyncio.run(new_life(volume).scanner.scan())
    shutil.rmtree(folder)
    return new_life(volume)


async def test_pins_that_cannot_be_listed_at_the_start_are_listed_again(only_a_pin: Services, failing: Failing) -> None:
    failing("/.ckpt/pins", errno.ESTALE)
    assert not await only_a_pin.scanner.take_over_pins()
    assert only_a_pin.scanner.volume_error
    failing("", 0)
    assert await only_a_pin.scanner.take_over_pins()
    assert state_of(only_a_pin, "checkpoint-20") is State.FINISHED


async def test_an_unexpected_error_forgets_no_pin(
    only_a_pin: Services, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing("/.complete", errno.ENFILE)
    await only_a_pin.scanner.take_over_pins()
    failing("", 0)
    with monkeypatch.context() as broken:
        broken.setattr(scanner, "judge", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            await only_a_pin.scanner.scan()
    await only_a_pin.scanner.scan()
    assert state_of(only_a_pin, "checkpoint-20") is State.FINISHED


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("is_held", [True, False])
def test_a_deleted_checkpoint_whose_links_cannot_be_seen_for_a_moment_is_judged_by_the_next_scan(
    is_held: bool, number: int, tmp_path: Path, failing: Failing
) -> None:
    """The error ended the scan: a resume that waited for it failed, and the log got a stack trace."""

    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        write_checkpoint(tmp_path / "volume", "checkpoint-20", {"a": b"x"}, {})
        await services.scanner.scan()
        shutil.rmtree(tmp_path / "volume/checkpoint-20")
        if not is_held:
            shutil.rmtree(tmp_path / "volume" / PINS)
            (tmp_path / "volume" / PINS).mkdir()
        failing(f"/{PINS}", number)
        await services.scanner.scan()
        assert state_of(services, "checkpoint-20") is State.FINISHED
        failing("", 0)
        await services.scanner.scan()
        assert state_of(services, "checkpoint-20") is (State.FINISHED if is_held else State.LOST)

    asyncio.run(scenario())
