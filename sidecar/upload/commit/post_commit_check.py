"""Post-commit checks: checkpoints are verified again while requests of an earlier attempt may still be in flight."""

from __future__ import annotations

from collections import Counter

import structlog

from sidecar.catalog.catalog import Catalog, Tracked
from sidecar.core.lifecycle.states import State
from sidecar.errors import Fenced, StoreError
from sidecar.lifecycle.deadline import Deadline
from sidecar.transfer.clock import Clock
from sidecar.upload.commit.committer import Committer

log = structlog.get_logger()

AFTER_S = ((5.0, True), (10.0, False))
"""Seconds from a commit to its checks, and whether each is thorough. By then, every other writer of the step has read the
commit. The thorough check comes first: if it revokes the commit, the other nodes notice at the second check."""
LATE_S = ((60.0, True), (65.0, False))
"""The same, for damage by late requests: a hedged or abandoned request may reach the store about a minute later."""
MOST_DOUBLINGS = 4
"""Maximum number of doublings of the delay before the checks of a checkpoint. It is doubled each time that the commit was gone,
so that another attempt that sends the step can finish."""
REPEATED_S = 300.0
"""Interval in seconds of later checks: an operator or a lifecycle rule may delete objects. A job of more nodes than this number
has one second for each node instead, so that the store gets at most one request a second."""
POLL_S = 1.0
"""Interval in seconds at which due checks are started."""
AGAIN_S = 5.0
"""Seconds until the repetition of a check that failed, or that must not revoke the commit now."""


class PostCommitCheck:
    """Uploads a checkpoint again if its commit is gone; not if a newer one is durable, or after a termination notice."""

    def __init__(self, catalog: Catalog, committer: Committer, deadline: Deadline, *, clock: Clock | None = None) -> None:
        self._catalog = catalog
        self._committer = committer
        self._deadline = deadline
        self._clock = clock or Clock()
        self._due: list[tuple[float, Tracked, bool]] = []
        """Due time (monotonic seconds), checkpoint, and whether the check is thorough."""
        self._gone: Counter[str] = Counter()
        """How often the commit of the newest durable version was gone."""

    def became_durable(self, tracked: Tracked) -> None:
        """Schedule the checks of a checkpoint."""
        now_s, factor = self._clock.monotonic(), 2 ** min(self._gone[tracked.version], MOST_DOUBLINGS)
        self._gone = Counter({tracked.version: self._gone[tracked.version]})
        self._due += [(now_s + factor * after_s, tracked, thoroughly) for after_s, thoroughly in (*AFTER_S, *LATE_S)]

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await self._clock.sleep(POLL_S)
            await self._check_due()

    async def _check_due(self) -> None:
        now_s = self._clock.monotonic()
        due, self._due = [d for d in self._due if d[0] <= now_s], [d for d in self._due if d[0] > now_s]
        for _, tracked, thoroughly in due:
            if self._matters(tracked) and not self._deadline.is_set():
                await self._check(tracked, thoroughly=thoroughly)

    def _matters(self, tracked: Tracked) -> bool:
        return tracked is self._catalog.newest_durable and tracked.state is State.COMMITTED

    async def _check(self, tracked: Tracked, *, thoroughly: bool) -> None:
        assert tracked.checkpoint is not None
        try:
            stands = await self._committer.is_still_committed(tracked.checkpoint, thoroughly=thoroughly)
        except Fenced:  # a later pod is responsible for the prefix now
            return
        except StoreError as error:
            log.warning("commit_not_looked_at", checkpoint=tracked.name, error=str(error), again_in_s=AGAIN_S)
            self._due.append((self._clock.monotonic() + AGAIN_S, tracked, thoroughly))
            return
        if stands and not thoroughly and all(other is not tracked for _, other, _ in self._due):
            again_s = max(REPEATED_S, float(tracked.checkpoint.node.count))
            self._due.append((self._clock.monotonic() + again_s, tracked, thoroughly))
        if not stands and tracked.state is State.COMMITTED:
            self._gone[tracked.version] += 1
            reason = "its commit was revoked, deleted, or damaged by another attempt: it is uploaded again"
            self._catalog.move(tracked, State.FINISHED, reason=reason)
