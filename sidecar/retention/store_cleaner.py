"""Retention in the store: runs it when newer commits have settled, and ends it."""

from __future__ import annotations

import asyncio
import time

import structlog

from sidecar.catalog.catalog import Catalog
from sidecar.core.commit.retention import turn_after_s
from sidecar.core.lifecycle.states import State
from sidecar.errors import Fenced, StoreError
from sidecar.retention.store_retention import StoreRetention
from sidecar.tasks import within
from trainer_hook.contract import Node

log = structlog.get_logger()

STORE_RETRY_S = 60.0
"""Seconds until the next try after the store refused a request."""


class StoreCleaner:
    """The service deletes checkpoints from the store. It is not part of ``VolumeCleaner``, which needs no store."""

    def __init__(self, catalog: Catalog, retention: StoreRetention, *, node: Node | None) -> None:
        self._catalog = catalog
        self._retention = retention
        self._node = node
        catalog.observe(lambda tracked: retention.written(tracked.name))

    async def run(self) -> None:
        """Clean until cancelled."""
        # The first check deletes nothing: a commit counts only once it was seen in two checks.
        due_s: float | None = time.monotonic() + turn_after_s(self._node)
        seen: frozenset[tuple[str, float | None]] = frozenset()
        while True:
            if due_s is None:
                while not self._durable() - seen:
                    await self._catalog.changed()
                due_s = time.monotonic() + turn_after_s(self._node)
            await asyncio.sleep(due_s - time.monotonic())
            seen = self._durable()  # read before the check: a commit made meanwhile triggers another check
            again_s = await self._clean()
            due_s = None if again_s is None else time.monotonic() + again_s

    async def end(self, *, within_s: float) -> None:
        """Begin no further deletion; those under way have the given time to end."""
        await within(within_s, self._retention.end())

    def _durable(self) -> frozenset[tuple[str, float | None]]:
        return frozenset((t.name, t.committed_at_s) for t in self._catalog.all() if t.state is State.COMMITTED)

    async def _clean(self) -> float | None:
        try:
            return await self._retention.run_once()
        except Fenced:  # a later pod cleans the store now
            return STORE_RETRY_S
        except StoreError as error:
            log.warning("store_not_cleaned", error=str(error), hint=f"tried again in {STORE_RETRY_S:.0f} s")
            return STORE_RETRY_S
