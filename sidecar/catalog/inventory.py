"""Completeness of the catalog: whether a finished checkpoint on the volume may still be unknown."""

from __future__ import annotations

import asyncio
from typing import Protocol

from sidecar.catalog.catalog import Catalog
from sidecar.catalog.scanner import SETTLE_S, Scanner
from sidecar.tasks import within
from sidecar.volume.volume import Volume
from trainer_hook.contract import step_of

_OF_ANOTHER_RUN = (
    "on the volume, of a run with another CKPT_STORE: if it is the same run, set the earlier store, or one CKPT_RUN_ID in both"
)


class SettledVolume(Protocol):
    """The volume as a resume needs to know it."""

    async def scan_until_settled(self) -> None:
        """Return once all finished checkpoints on the volume are known to the catalog."""
        ...

    def of_another_run(self) -> list[tuple[str, str]]:
        """Return checkpoints that are not this run's, each with the reason why it is not used."""
        ...


class Inventory:
    """The volume as the catalog knows it. Used from the event loop alone."""

    def __init__(self, volume: Volume, catalog: Catalog, scanner: Scanner) -> None:
        self._volume = volume
        self._catalog = catalog
        self._scanner = scanner
        self.scanned = asyncio.Event()
        """Set after the first scan, once the checkpoints that an earlier process held were taken over."""

    async def scan(self) -> None:
        """Scan the volume once. A scan whose caller is cancelled goes on: what it found so far is not forgotten."""
        await asyncio.shield(asyncio.create_task(self._scanner.scan()))

    async def scan_until_settled(self) -> None:
        """Scan until everything that the trainer finished up to now is known."""
        await self.scan()
        while self._scanner.unsettled:
            await self.changed()

    async def changed(self) -> None:
        """Wait for the next change of a checkpoint, or until a marker that is being written may be examined again."""
        if not await within(SETTLE_S if self.unseen() else None, self._catalog.changed()):
            await self.scan()

    def unseen(self) -> str | None:
        """Return why a finished checkpoint may be unknown; ``None``: all are known."""
        if not self.scanned.is_set():
            return "the volume was not scanned yet"
        if self._scanner.unsettled:
            return f"{', '.join(self._scanner.unsettled_names()) or 'a checkpoint'} on the volume is still being examined"
        try:
            self._volume.names()
        except OSError as error:
            return f"the volume cannot be read: {error.strerror}"
        return None

    def of_another_run(self) -> list[tuple[str, str]]:
        """Return the newest checkpoint that another run left on the volume, with the reason why it is not used; or nothing."""
        return [(name, _OF_ANOTHER_RUN) for name in self._scanner.foreign_names()[:1]]

    def everything_durable(self) -> bool:
        """Whether no finished checkpoint is pending, and none may be unknown."""
        return not self._catalog.pending() and self.unseen() is None

    def unfinished(self, *, trainer_alive: bool) -> dict[str, str]:
        """Return the directories without a marker beyond the newest durable step, with the reason."""
        try:
            names = [name for name in self._volume.names() if self._volume.marker_version(name) is None]
        except OSError:
            return {}
        durable = self._catalog.newest_durable_step
        newer = [name for name in names if (step := step_of(name)) is not None and (durable is None or step > durable)]
        reason = "the trainer was still writing it" if trainer_alive else "the trainer ended before it was finished"
        return dict.fromkeys(newer, reason)
