"""Space on the volume that earlier downloads took."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.download.request import ResumeState
from tests.download.committed import DamagedWay, commit_step
from tests.download.test_unusable_steps import answer, runtime_on
from tests.mounts import small_volume
from tests.process.sidecar_process import contents

MIB = 1 << 20


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A volume of 8 MiB."""
    with small_volume(tmp_path / "volume", "8m") as folder:
        yield folder


def test_a_download_of_another_checkpoint_that_was_interrupted_takes_no_space_of_this_one(volume: Path) -> None:
    files = {"model": b"m" * (6 * MIB)}

    async def scenario() -> None:
        store = DamagedWay()
        commit_step(store, 10, files)
        # What a download of another checkpoint leaves when its process is killed, or when another request comes first.
        begun = volume / ".ckpt/incoming/partial"
        begun.mkdir(parents=True)
        (begun / "0123456789abcdef01234567").write_bytes(b"x" * (5 * MIB))
        status = await answer(runtime_on(store, volume))
        assert (status.state, status.checkpoint) == (ResumeState.READY, "checkpoint-10"), status.detail
        assert contents(volume / "checkpoint-10") == files

    asyncio.run(scenario())
