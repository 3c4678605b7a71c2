"""Checkpoints in the store that this process did not write: read in the background, and only while somebody watches."""

from __future__ import annotations

import asyncio
import time
from typing import Literal

from sidecar.api import models
from sidecar.api.stored import stored_checkpoint
from sidecar.core.commit.resume import newest_first
from sidecar.core.lifecycle.phases import Phase
from sidecar.daemon.services import Services
from sidecar.download.downloader import Downloader
from sidecar.errors import StoreError

MOST = 60
"""Number of checkpoints read, the newest. Each costs two small requests, once."""
AT_ONCE = 4
PATIENCE_S = 60.0
"""Longest time of one reading in seconds."""
KEPT_S = 300.0
"""Seconds after which the listing is read again."""


class StoreHistory:
    """The newest checkpoints of the store. Commits are read once; a listing shows which of them were deleted since."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._known: dict[str, models.Checkpoint | None] = {}
        self._folders: int | None = None
        self._state: Literal["unread", "reading", "read", "failed"] = "unread"
        self._detail: str | None = None
        self._read_s = float("-inf")
        self._task: asyncio.Task[None] | None = None

    def newest(self) -> list[models.Checkpoint]:
        """Return the committed checkpoints that were read, in no order."""
        return [checkpoint for checkpoint in self._known.values() if checkpoint is not None]

    def status(self) -> models.Earlier:
        """Return how far the reading is."""
        return models.Earlier(state=self._state, folders=self._folders, detail=self._detail)

    def refresh(self) -> None:
        """Begin to read, if that is due and the store is idle enough: never during a flush."""
        services = self._services
        reader = services.store_reader.downloader
        is_busy = self._task is not None and not self._task.done()
        if reader is None or is_busy or services.state.phase not in (Phase.STARTING, Phase.RUNNING):
            return
        if services.health.unreachable is not None or time.monotonic() - self._read_s < KEPT_S:
            return
        self._state = "reading" if self._state != "read" else self._state
        self._task = asyncio.create_task(self._read(reader))

    def stop(self) -> None:
        """Cancel a reading."""
        if self._task is not None:
            self._task.cancel()

    async def _read(self, reader: Downloader) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                folders = newest_first(await reader.list_folders(), and_final=True)
                self._folders = len(folders)
                names = folders[:MOST]
                self._known = {name: commit for name, commit in self._known.items() if name in names and commit is not None}
                places = asyncio.Semaphore(AT_ONCE)
                await asyncio.gather(*(self._read_one(reader, name, places) for name in names if name not in self._known))
            self._state, self._detail = "read", None
        except asyncio.CancelledError:  # nobody watches any more
            self._state = "read" if self._state == "read" else "unread"
            raise
        except (StoreError, TimeoutError) as error:
            self._state, self._detail = "failed", str(error) or f"no answer within {PATIENCE_S:.0f} s"
        self._read_s = time.monotonic()

    async def _read_one(self, reader: Downloader, name: str, places: asyncio.Semaphore) -> None:
        async with places:
            self._known[name] = await stored_checkpoint(reader, name)
