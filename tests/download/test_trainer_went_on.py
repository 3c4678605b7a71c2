"""A request whose trainer does not wait for its answer: what the trainer writes meanwhile stays its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sidecar.daemon.services import Services
from sidecar.download import request
from sidecar.download.downloader import Downloader
from sidecar.download.request import AskedBy, ResumeState
from tests.catalog.test_volume_trouble import new_life
from tests.download.committed import DamagedWay, commit_step
from tests.process.sidecar_process import contents

FILES = {"model": b"M" * 3000, "optimizer": b"O" * 500}


def open_store(services: Services) -> None:
    store = DamagedWay()
    for step in (10, 20):
        commit_step(store, step, FILES)
    services.store_reader.opened(Downloader(store, services.volume, services.executor))
    services.store_reader.grant()


@pytest.mark.parametrize("waits", ["no longer", "still", "again"])
def test_a_download_replaces_no_directory_that_a_trainer_writes_after_its_wait(
    waits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had waited for CKPT_RESUME_TIMEOUT_S, began from scratch, and would have written its last files into the download."""
    monkeypatch.setattr(request, "UNPOLLED_S", 0.2)

    async def scenario() -> None:
        services = new_life(tmp_path)
        resumes = services.resume_service
        asked = resumes.request("latest", asked_by=AskedBy.TRAINER)
        await resumes.progress(asked.id, timeout_s=0.05)
        waiting = asyncio.create_task(resumes.progress(asked.id, timeout_s=30)) if waits == "still" else None
        await asyncio.sleep(0.4)
        (tmp_path / "checkpoint-20").mkdir()
        (tmp_path / "checkpoint-20/model").write_bytes(b"of the trainer")
        if waits == "again":  # it was started again, and what it had begun to write is abandoned
            assert resumes.request("latest", asked_by=AskedBy.TRAINER).id == asked.id
            waiting = asyncio.create_task(resumes.progress(asked.id, timeout_s=30))
            await asyncio.sleep(0)
        open_store(services)
        while not (status := resumes.status(asked.id)) or not request.RESUME_ENDED & {status.state}:
            await asyncio.sleep(0.01)
        if waits == "no longer":
            assert contents(tmp_path / "checkpoint-20") == {"model": b"of the trainer"}
            assert status.state is ResumeState.FAILED
            assert "checkpoint-20" in (status.detail or "")
            assert not (tmp_path / "checkpoint-10").exists(), "nothing else is downloaded for nobody"
            status = await resumes.progress(resumes.request("latest", asked_by=AskedBy.TRAINER).id, timeout_s=30)
        assert status is not None
        assert (status.state, status.checkpoint) == (ResumeState.READY, "checkpoint-20")
        assert contents(tmp_path / "checkpoint-20") == FILES
        if waiting is not None:
            await waiting

    asyncio.run(scenario())


def test_a_prefetch_replaces_no_directory_that_a_script_may_be_writing(tmp_path: Path) -> None:
    """A shell script holds no lease, and does not wait for the store."""

    async def scenario() -> None:
        services = new_life(tmp_path)
        (tmp_path / "checkpoint-20").mkdir()
        (tmp_path / "checkpoint-20/model").write_bytes(b"of the script")
        open_store(services)
        services.resume_service.prefetch()
        await services.resume_service.progress(timeout_s=30)
        assert contents(tmp_path / "checkpoint-20") == {"model": b"of the script"}

    asyncio.run(scenario())
