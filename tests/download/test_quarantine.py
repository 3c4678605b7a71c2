"""What this node found damaged, and who waits for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sidecar.download.quarantine import Quarantine
from sidecar.volume.opener import Folder


async def test_a_finding_is_not_missed_by_a_wait_that_begins_in_the_same_moment(tmp_path: Path) -> None:
    """Its record was neither written to the store nor deleted there until the next finding."""
    quarantine = Quarantine(Folder(tmp_path) / "quarantine.json")
    waiting = asyncio.ensure_future(quarantine.changed())
    quarantine.add("checkpoint-10", "0" * 16, "damaged")
    async with asyncio.timeout(5.0):
        await waiting
