"""What a flush waits for: everything that was finished when it was asked, or while it waits."""

from __future__ import annotations

from sidecar.api import views
from sidecar.api.problems import Missing
from sidecar.catalog import Tracked
from sidecar.core.states import PENDING, State
from sidecar.runtime import Runtime

NEVER_DURABLE = frozenset({State.GIVEN_UP, State.LOST, State.REJECTED})


class Asked:
    """One call. Remembers what was pending, because what is given up is pending no longer and yet not durable."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._waited_for: dict[str, Tracked] = {}

    async def all_settled(self) -> None:
        """Return when nothing is pending any more."""
        while True:
            self._remember()
            if self._runtime.everything_durable():
                if not self._vanished():
                    return
                # One that starts over is forgotten until the volume is looked at again.
                await self._runtime.look()
                self._remember()
                if self._runtime.everything_durable():
                    return
            await self._runtime.settled()

    def missing(self) -> list[Missing]:
        """Return what is not durable, and what never will be; empty exactly when all that is finished is durable."""
        queue = [Missing.model_validate(t.model_dump()) for t in views.queue(self._runtime)]
        known = {missing.checkpoint for missing in queue}
        ended = [t for t in self._waited_for.values() if t.name not in known and self._is_missing(t)]
        queue += [Missing(checkpoint=t.name, state=t.state, reason=t.reason) for t in ended]
        unseen = self._runtime.unseen()
        if not queue and unseen is not None:
            queue = [Missing(checkpoint="the last checkpoints", state=State.WRITING, reason=unseen)]
        return queue

    def _remember(self) -> None:
        self._waited_for |= {tracked.name: tracked for tracked in self._runtime.catalog.pending()}

    def _vanished(self) -> list[Tracked]:
        return [t for t in self._waited_for.values() if t.state in PENDING and self._runtime.catalog.get(t.name) is None]

    def _is_missing(self, tracked: Tracked) -> bool:
        now = self._runtime.catalog.get(tracked.name) or tracked
        return now.state in NEVER_DURABLE or now.state in PENDING
