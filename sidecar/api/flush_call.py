"""A flush call: waits for all checkpoints that were finished before the call or while it waits."""

from __future__ import annotations

from sidecar.api import views
from sidecar.api.problems import Missing
from sidecar.catalog.catalog import Tracked
from sidecar.core.lifecycle.states import PENDING, UNSAVED, State
from sidecar.daemon.services import Services


class FlushCall:
    """One flush call. It records pending checkpoints, because one that is given up is neither pending nor durable."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._waited_for: dict[str, Tracked] = {}

    async def all_settled(self) -> None:
        """Scan the volume, then wait until no checkpoint is pending."""
        await self._services.inventory.scan()
        while True:
            self._remember()
            if self._services.inventory.everything_durable():
                if not self._vanished():
                    return
                # A checkpoint that starts over is unknown until the next scan of the volume.
                await self._services.inventory.scan()
                self._remember()
                if self._services.inventory.everything_durable():
                    return
            await self._services.inventory.changed()

    def missing(self) -> list[Missing]:
        """Return the checkpoints that are not durable, or never will be; empty exactly when all finished ones are durable."""
        found = {t.checkpoint: Missing.model_validate(t.model_dump()) for t in views.queue(self._services)}
        ended = filter(self._is_missing, self._waited_for.values())
        for tracked in (*ended, *self._services.catalog.newest_rejected()):
            found.setdefault(tracked.name, Missing(checkpoint=tracked.name, state=tracked.state, reason=tracked.reason))
        unseen = self._services.inventory.unseen()
        if not found and unseen is not None:
            return [Missing(checkpoint="the last checkpoints", state=State.WRITING, reason=unseen)]
        return list(found.values())

    def _remember(self) -> None:
        self._waited_for |= {tracked.name: tracked for tracked in self._services.catalog.pending()}

    def _vanished(self) -> list[Tracked]:
        return [t for t in self._waited_for.values() if t.state in PENDING and self._services.catalog.get(t.name) is None]

    def _is_missing(self, tracked: Tracked) -> bool:
        now = self._services.catalog.get(tracked.name) or tracked
        return now.state in UNSAVED or now.state in PENDING
