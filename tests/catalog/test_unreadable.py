"""What the volume fails to read, and goes on failing to read: it is shown, and taken once it can be read."""

from __future__ import annotations

import asyncio
import errno
import shutil
from pathlib import Path

import pytest

from sidecar.catalog import scanner
from sidecar.core.lifecycle.states import State
from tests.catalog.conftest import Failing
from tests.catalog.test_volume_trouble import new_life, state_of
from tests.process.sidecar_process import write_checkpoint


def test_a_directory_that_stays_unreadable_is_shown_until_it_can_be_read(
    tmp_path: Path, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ended beside it had exit code 0: whether it had a marker was not known, and nothing said so."""

    async def scenario() -> None:
        services = new_life(tmp_path / "volume")
        write_checkpoint(tmp_path / "volume", "checkpoint-20", {"a": b"x"}, {})
        failing("volume/checkpoint-20", errno.EIO)
        monkeypatch.setattr(scanner, "TROUBLE_S", 0.0)
        await services.scanner.scan()
        await services.scanner.scan()
        assert state_of(services, "checkpoint-20") is State.REJECTED
        assert not services.scanner.unsettled
        tracked = services.catalog.get("checkpoint-20")
        assert tracked
        assert "Input/output error" in (tracked.reason or "")
        assert services.catalog.newest_rejected() == [tracked]
        failing("", 0)
        await services.scanner.scan()
        assert state_of(services, "checkpoint-20") is State.FINISHED

    asyncio.run(scenario())


def test_links_that_stay_unreadable_are_shown_and_taken_once_they_can_be_read(
    tmp_path: Path, failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be the only copy of the newest step: the exit code was 0 beside them."""

    async def scenario() -> None:
        before = new_life(tmp_path / "volume")
        folder = write_checkpoint(tmp_path / "volume", "checkpoint-20", {"a": b"x"}, {})
        await before.scanner.scan()
        shutil.rmtree(folder)
        services = new_life(tmp_path / "volume")
        monkeypatch.setattr(scanner, "TROUBLE_S", 0.0)
        failing(".ckpt/pins/checkpoint-20", errno.EIO)
        await services.scanner.take_over_pins()
        await services.scanner.scan()
        assert [tracked.name for tracked in services.catalog.newest_rejected()] == ["checkpoint-20"]
        failing("", 0)
        await services.scanner.scan()
        assert state_of(services, "checkpoint-20") is State.FINISHED

    asyncio.run(scenario())
