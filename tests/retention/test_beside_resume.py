"""Retention beside a resume that is about to choose a step that retention would delete."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from sidecar.core.format import keys
from sidecar.core.format.manifest import MAX_DOCUMENT_BYTES
from sidecar.download.request import ResumeState
from sidecar.retention.known_steps import KnownSteps
from sidecar.retention.store_retention import StoreRetention
from tests.download.committed import DamagedWay, commit_step
from tests.download.test_unusable_steps import OTHERS, runtime_on


class SlowManifest(DamagedWay):
    """Gives the manifest of the oldest step out when told."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go_on = threading.Event(), threading.Event()

    def get(self, key: str, *, most_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        if key.startswith(keys.manifests("checkpoint-10")) and not self.reached.is_set():
            self.reached.set()
            assert self.go_on.wait(20)
        return super().get(key, most_bytes=most_bytes)


async def test_a_step_whose_documents_a_resume_reads_is_not_deleted(tmp_path: Path) -> None:
    """A node that was told the step that node 0 had chosen deleted it before its download began."""
    store = SlowManifest()
    for step in (10, 20):
        commit_step(store, step, OTHERS)
    services = runtime_on(store, tmp_path / "volume")
    known = KnownSteps(services.catalog, services.resume_service, services.quarantine, is_idle=True)
    retention = StoreRetention(
        store, services.executor, keep_newest=1, keep_every_steps=None, known=known, events=services.events
    )
    asked = services.resume_service.request("checkpoint-10")
    assert await asyncio.to_thread(store.reached.wait, 20)
    await retention.run_once()
    store.go_on.set()
    status = await services.resume_service.progress(asked.id, timeout_s=30)
    assert status is not None
    assert (status.state, status.checkpoint) == (ResumeState.READY, "checkpoint-10"), status
    await retention.run_once()
    assert store.get(keys.commit("checkpoint-10"))
