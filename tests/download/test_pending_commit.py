"""A resume of several nodes beside sidecars that are about to commit a newer step than the committed ones."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from sidecar.download import pending_commit
from sidecar.download.request import AskedBy, ResumeState
from tests.download.committed import DamagedWay, commit_step
from tests.download.test_unusable_steps import FILES, OTHERS, answer, reasons, runtime_on
from tests.process.sidecar_process import write_checkpoint


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_commit, "PATIENCE_S", 3.0)
    monkeypatch.setattr(pending_commit, "POLL_S", 0.02)


@pytest.fixture
def store() -> DamagedWay:
    return DamagedWay()


PART = {"format": 1, "step": 20, "attempt": "a", "node": {"index": 0, "count": 2}}


@pytest.mark.parametrize("comes", [True, False])
def test_a_step_of_several_nodes_that_is_about_to_be_committed_is_waited_for(
    comes: bool, store: DamagedWay, tmp_path: Path
) -> None:
    """Training that starts again beside sidecars that went on: it had lost what they committed a second later."""

    async def scenario() -> None:
        commit_step(store, 10, OTHERS, {})
        services = runtime_on(store, tmp_path / "volume", CKPT_NODE_INDEX="0", CKPT_NODE_COUNT="2")
        write_checkpoint(tmp_path / "volume", "checkpoint-20", FILES, PART)
        asked = services.resume_service.request("latest")
        await asyncio.sleep(0.3)
        before = services.resume_service.status(asked.id)
        assert before is not None
        assert before.state not in (ResumeState.READY, ResumeState.NONE)
        if comes:
            commit_step(store, 20, FILES, {})
        status = await services.resume_service.progress(asked.id, timeout_s=30)
        assert status is not None
        assert (status.state, status.checkpoint) == (ResumeState.READY, "checkpoint-20" if comes else "checkpoint-10")
        assert list(reasons(status)) == ([] if comes else ["checkpoint-20"])

    asyncio.run(scenario())


def test_a_person_does_not_wait_for_a_commit_that_is_pending(store: DamagedWay, tmp_path: Path) -> None:
    async def scenario() -> None:
        commit_step(store, 10, OTHERS, {})
        services = runtime_on(store, tmp_path / "volume", CKPT_NODE_INDEX="0", CKPT_NODE_COUNT="2")
        write_checkpoint(tmp_path / "volume", "checkpoint-20", FILES, PART)
        began_s = time.monotonic()
        assert (await answer(services, asked_by=AskedBy.PERSON)).checkpoint == "checkpoint-10"
        assert time.monotonic() - began_s < pending_commit.PATIENCE_S

    asyncio.run(scenario())


@pytest.mark.parametrize("comes", [True, False])
def test_a_job_with_more_nodes_than_before_waits_for_the_commit_of_what_one_saved(
    comes: bool, store: DamagedWay, tmp_path: Path
) -> None:
    """Node 0 answered with the checkpoint on its volume, which the others cannot have: all went back to an older one."""

    async def scenario() -> None:
        commit_step(store, 10, OTHERS)
        services = runtime_on(store, tmp_path / "volume", CKPT_NODE_INDEX="0", CKPT_NODE_COUNT="2")
        write_checkpoint(tmp_path / "volume", "checkpoint-20", FILES, PART | {"node": {"index": 0, "count": 1}})
        asked = services.resume_service.request("latest")
        await asyncio.sleep(0.3)
        if comes:
            commit_step(store, 20, FILES)
        status = await services.resume_service.progress(asked.id, timeout_s=30)
        assert status is not None
        assert (status.state, status.checkpoint) == (ResumeState.READY, "checkpoint-20" if comes else "checkpoint-10")

    asyncio.run(scenario())
