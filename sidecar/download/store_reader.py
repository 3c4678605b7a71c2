"""Reader of the store for resumes and listings, which may ask for it before the store was reached."""

from __future__ import annotations

import asyncio

from sidecar.download.downloader import Downloader
from sidecar.transfer.health import Health


class StoreReader:
    """The downloader, once the store was reached. Any number of tasks may wait for it."""

    def __init__(self, health: Health, downloader: Downloader | None = None) -> None:
        self.health = health
        self.downloader = downloader
        """``None`` until the store was reached."""
        self._opened = asyncio.Event()

    def opened(self, downloader: Downloader) -> None:
        """Begin to read: the store is reachable, and the volume was scanned once."""
        self.downloader = downloader
        self._opened.set()

    async def once_open(self) -> Downloader:
        """Return the downloader, as soon as there is one."""
        while self.downloader is None:
            await self._opened.wait()
        return self.downloader

    async def list_folders(self) -> list[str]:
        """Return the names of all checkpoints in the store, as soon as it can be read."""
        return await (await self.once_open()).list_folders()
