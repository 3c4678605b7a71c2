"""Looks again at what became durable, while pods of an earlier attempt may still have requests on their way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from sidecar.catalog.catalog import Catalog, Tracked
from sidecar.core.lifecycle.states import State
from sidecar.errors import Fenced, StoreError
from sidecar.lifecycle.pod import PodState
from sidecar.upload.commit.committer import Committer

log = structlog.get_logger()

AFTER_S = ((5.0, True), (10.0, False))
"""Seconds after a checkpoint became durable when it is looked at again, and whether thoroughly: by then, whoever else wrote the
same step has seen the commit. Thoroughly first, so that what one node takes back the others find gone."""
TICK_S = 1.0
"""How often it is looked whether one is due."""


class PostCommitCheck:
    """What does not stand any more is sent again, unless something newer is durable or the pod is going."""

    def __init__(
        self,
        catalog: Catalog,
        committer: Committer,
        pod: PodState,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalog = catalog
        self._committer = committer
        self._pod = pod
        self._clock = clock
        self._due: list[tuple[float, Tracked, bool]] = []
        """When which checkpoint is looked at, and whether thoroughly (monotonic)."""

    def became_durable(self, tracked: Tracked) -> None:
        """Look again at a checkpoint, twice."""
        now_s = self._clock()
        self._due += [(now_s + after_s, tracked, thoroughly) for after_s, thoroughly in AFTER_S]

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            await self.look_at_due()

    @property
    def next_due_s(self) -> float | None:
        """When the next one is due, by the clock; ``None``: there is none."""
        return min((at_s for at_s, _, _ in self._due), default=None)

    async def look_at_due(self) -> None:
        """Look at those that are due now."""
        now_s = self._clock()
        due, self._due = [d for d in self._due if d[0] <= now_s], [d for d in self._due if d[0] > now_s]
        for _, tracked, thoroughly in due:
            if self._matters(tracked) and self._pod.left_s() is None:
                await self._look(tracked, thoroughly=thoroughly)

    def _matters(self, tracked: Tracked) -> bool:
        return tracked is self._catalog.newest_durable and tracked.state is State.COMMITTED

    async def _look(self, tracked: Tracked, *, thoroughly: bool) -> None:
        assert tracked.checkpoint is not None
        try:
            stands = await self._committer.still_stands(tracked.checkpoint, thoroughly=thoroughly)
        except Fenced:  # a later pod looks after the prefix now
            return
        except StoreError as error:
            log.warning("commit_not_looked_at", checkpoint=tracked.name, error=str(error))
            return
        if not stands and tracked.state is State.COMMITTED:
            reason = "its commit was taken back or hit by another attempt: it is sent again"
            self._catalog.move(tracked, State.FINISHED, reason=reason)
