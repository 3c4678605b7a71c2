"""Files that are sent before the marker."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sidecar.errors import Fenced
from sidecar.upload.early import early_upload
from sidecar.upload.early.early_upload import EarlyUploads
from sidecar.volume.volume import Volume
from sidecar.volume.watch import Hints
from tests.store.memory import MemoryStore
from tests.upload.parts import LastingPod, executor, uploads
from trainer_hook.contract import Node


class _FencedPod(LastingPod):
    """A later pod of its job has taken the prefix over."""

    asked = 0

    async def objection(self, node: Node | None, attempt: str, *, until_declared: bool = False) -> str | None:
        self.asked += 1
        raise Fenced("a later pod of this job has taken it over")


async def test_a_fenced_pod_sends_nothing_early_and_its_uploader_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``Fenced`` ended the uploader each time that a trainer of a fenced pod began a checkpoint."""
    monkeypatch.setattr(early_upload, "LEAST_BYTES", 1)
    monkeypatch.setattr(early_upload, "POLL_S", 0.01)
    store, fenced = MemoryStore(), _FencedPod()
    volume = Volume(tmp_path)
    volume.prepare()
    hints = Hints(volume)
    file = tmp_path / "checkpoint-10" / "model"
    file.parent.mkdir()
    file.write_bytes(b"weights")
    hints._closed[str(file)] = time.time() + 1
    with executor(concurrency=2) as threads:
        context = replace(uploads(store, threads), lease=fenced)
        sending = asyncio.create_task(EarlyUploads(context, volume, hints).run())
        async with asyncio.timeout(5):
            while not fenced.asked and not sending.done():
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert fenced.asked
        assert not sending.done()
        assert not list(store.list(""))
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
