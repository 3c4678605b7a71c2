"""Reader of the store for resumes and listings, which may ask for it before the store was reached."""

from __future__ import annotations

import asyncio

from sidecar.core.lifecycle.prefix_ownership import SILENCE_S
from sidecar.download.downloader import Downloader
from sidecar.tasks import in_running_time
from sidecar.transfer.health import Health


class StoreReader:
    """The downloader, once the store was reached. Any number of tasks may wait for it."""

    def __init__(self, health: Health, downloader: Downloader | None = None) -> None:
        self.health = health
        self.downloader = downloader
        """``None`` until the store was reached."""
        self._opened = asyncio.Event()
        self._granted = asyncio.Event()
        if downloader is not None:
            self._granted.set()

    def opened(self, downloader: Downloader) -> None:
        """Begin to read: the store is reachable, and the volume was scanned once."""
        self.downloader = downloader
        self._opened.set()

    def grant(self) -> None:
        """Let resumes be answered: the prefix is this run's."""
        self._granted.set()

    @property
    def is_granted(self) -> bool:
        """Whether the prefix is known to be this run's, so that what it has may be offered to the trainer."""
        return self._granted.is_set()

    async def once_granted(self) -> None:
        """Return as soon as it is known that no other run holds the prefix."""
        await self._granted.wait()

    async def once_open(self) -> Downloader:
        """Return the downloader, as soon as there is one."""
        while self.downloader is None:
            await self._opened.wait()
        return self.downloader

    async def list_folders(self, *, patience_s: float | None) -> list[str]:
        """Return the names of all checkpoints in the store, once the prefix is known to be this run's: no earlier pod commits.

        Raises:
            TimeoutError: The store did not answer within ``patience_s``; ``SILENCE_S`` more while the pod that held the prefix
                is asked for a sign of life. ``None``: no limit.
        """
        reader = await in_running_time(patience_s, self.once_open())
        await in_running_time(None if patience_s is None else patience_s + SILENCE_S, self.once_granted())
        return await in_running_time(patience_s, reader.list_folders())
