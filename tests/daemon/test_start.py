"""The start of the daemon on a volume that fails once."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from sidecar.core.format import obstacles
from sidecar.daemon.daemon import Daemon
from sidecar.daemon.settings import from_environment
from sidecar.volume.opener import Folder, Place
from tests.store.memory import MemoryStore
from trainer_hook.contract import JOURNAL, LOCK, RUNS, SYSTEM_DIR


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("inside", [SYSTEM_DIR, LOCK, JOURNAL, RUNS])
def test_an_error_of_the_volume_that_passes_ends_no_start(
    inside: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with exit code 2. Each path of the volume fails at its first use."""
    monkeypatch.setattr(obstacles, "RETRY_S", (0.0, 0.0, 0.0))
    opened, status, failed = Folder.open, Place.status, list[str]()

    def fail_once(path: str) -> None:
        if path.endswith(inside) and not failed:
            failed.append(path)
            raise OSError(number, os.strerror(number), path)

    def open_(folder: Folder, path: str, *more: Any) -> int:
        fail_once(path)
        return opened(folder, path, *more)

    def status_(place: Place) -> os.stat_result:
        fail_once(place.inside)
        return status(place)

    monkeypatch.setattr(Folder, "open", open_)
    monkeypatch.setattr(Place, "status", status_)
    for name in ("volume", "state"):
        (tmp_path / name).mkdir()
    environ = {"CKPT_DIR": str(tmp_path / "volume"), "CKPT_STATE_DIR": str(tmp_path / "state"), "CKPT_STORE": "file:///nowhere"}

    async def start() -> str | None:
        return await Daemon(from_environment(environ), MemoryStore())._take_volume(asyncio.Event())

    assert asyncio.run(start()) is None
    assert failed
