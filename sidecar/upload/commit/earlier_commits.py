"""Checks of commits without a post-commit check: at a start the latest ones of earlier sidecars, later those of older steps."""

from __future__ import annotations

import asyncio
from typing import Protocol, TypeGuard

import structlog

from sidecar.catalog.catalog import Catalog, Tracked
from sidecar.catalog.events import Events
from sidecar.core.commit.resume import newest_first
from sidecar.core.format import keys
from sidecar.core.lifecycle.states import PENDING, State
from sidecar.core.lifecycle.unchecked_commits import MOST, unchecked_commits
from sidecar.errors import StoreError
from sidecar.lifecycle.deadline import Deadline
from sidecar.repository.documents import StoredCommit
from sidecar.store.protocol import Store
from sidecar.transfer.clock import Clock
from sidecar.transfer.executor import StoreExecutor
from sidecar.upload.commit.committer import Committer
from sidecar.upload.commit.post_commit_check import AFTER_S, LATE_S, POLL_S

log = structlog.get_logger()

MOST_READ_BYTES = 256 << 20
"""Maximum number of bytes that the check of one commit reads of objects that only their content can prove."""
ANSWER_S = 60.0
"""Seconds for the requests of one commit: a store that refuses one object for ever must not look degraded because of it."""
_HINT = "a late request of an earlier pod did this, or another program; resumes use another step"
_NOT_READ = "it stays as it is: a resume verifies each checkpoint anyway"


class Findings(Protocol):
    """Where damaged commits are recorded."""

    def add(self, name: str, crc: str, reason: str, *, missing: str | None = None) -> None:
        """Quarantine a commit. ``missing``: key of the object that was missing; ``None``: the damage is another one."""
        ...


class Resumes(Protocol):
    """Requests to resume, which go before the checks: both read documents, which in a store of others may be large."""

    @property
    def are_answered(self) -> bool:
        """Whether no request is worked on."""
        ...


class EarlierCommits:
    """Looks after the start, and when no request of an earlier pod can arrive any more; not after a termination notice.

    ``PostCommitCheck`` looks at the newest durable step alone: a step that a newer one has followed within seconds is checked
    here.

    A damaged commit is quarantined. If its step is on this volume, the step is uploaded again, which replaces the commit.
    """

    def __init__(
        self,
        store: Store,
        executor: StoreExecutor,
        committer: Committer,
        catalog: Catalog,
        findings: Findings,
        events: Events,
        *,
        resumes: Resumes,
        deadline: Deadline,
    ) -> None:
        self._store = store
        self._executor = executor
        self._committer = committer
        self._catalog = catalog
        self._findings = findings
        self._events = events
        self._resumes = resumes
        self._deadline = deadline
        self._clock = Clock()
        self._due: list[tuple[float, Tracked]] = []
        """Monotonic seconds at which a commit of this process is checked, if it is not the newest then."""
        catalog.observe(self._became_durable)

    def _became_durable(self, tracked: Tracked) -> None:
        if not tracked.is_restored:
            self._due.append((self._clock.monotonic() + AFTER_S[0][0], tracked))

    async def run(self) -> None:
        """Check until cancelled."""
        again_s = self._clock.monotonic() + LATE_S[-1][0]
        await self._clock.sleep(AFTER_S[0][0])  # a starting trainer asks for its resume meanwhile
        await self.check()
        while True:
            await self._clock.sleep(POLL_S)
            now_s = self._clock.monotonic()
            due, self._due = [d for d in self._due if d[0] <= now_s], [d for d in self._due if d[0] > now_s]
            for tracked in (tracked for _, tracked in due if self._is_older(tracked)):
                await self._check_one(tracked.name)
            if now_s >= again_s:
                again_s = float("inf")
                await self.check()

    def _is_older(self, tracked: Tracked) -> bool:
        return tracked is not self._catalog.newest_durable and tracked.state is State.COMMITTED

    async def check(self) -> None:
        """Check the present commits. One that cannot be read now is left to the next check, and to the next start."""
        try:
            async with asyncio.timeout(ANSWER_S):
                names = await self._unchecked()
        except (StoreError, TimeoutError) as error:
            log.warning("commit_not_looked_at", error=str(error), hint=_NOT_READ)
            return
        for name in names:
            await self._check_one(name)

    async def _check_one(self, name: str) -> None:
        while not self._resumes.are_answered:
            await self._clock.sleep(POLL_S)
        if self._deadline.is_set():
            return
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._check(name)
        except (StoreError, TimeoutError) as error:
            log.warning("commit_not_looked_at", checkpoint=name, error=str(error), hint=_NOT_READ)

    async def _unchecked(self) -> list[str]:
        names = await self._executor.persistently(lambda: list(self._store.list_folders()))
        highest = newest_first(names, and_final=True)[:MOST]
        listed = await self._executor.together([self._modified(name) for name in highest])
        return unchecked_commits({name: at for name, at in zip(highest, listed, strict=True) if at is not None})

    async def _modified(self, name: str) -> str | None:
        key = keys.commit(name)
        found = await self._executor.persistently(lambda: list(self._store.list(key)))
        return next((stored.modified for stored in found if stored.key == key), None)

    async def _check(self, name: str) -> None:
        tracked = self._catalog.get(name)
        if tracked is not None and tracked.state in PENDING:  # its upload compares it
            return
        stored = await self._committer.stored_commit(name)
        if stored is None or stored.commit is None or await self._committer.is_quarantined(name, stored.crc64nvme):
            return
        damaged = await self._committer.damaged(stored.commit, most_bytes=MOST_READ_BYTES)
        again = await self._committer.stored_commit(name) if damaged else None
        if again is None or again.crc64nvme != stored.crc64nvme:  # whole, or somebody writes the step again
            return
        await self._quarantine(name, stored, damaged)
        if self._is_on_volume(tracked):
            reason = "a late request damaged it after its commit: it is uploaded again"
            self._catalog.move(tracked, State.FINISHED, reason=reason)

    def _is_on_volume(self, tracked: Tracked | None) -> TypeGuard[Tracked]:
        """Whether this node alone can upload a checkpoint again."""
        if tracked is None or tracked.checkpoint is None or tracked.is_restored or self._catalog.is_replaced(tracked):
            return False
        return tracked.state is State.COMMITTED and tracked.checkpoint.node.count == 1

    async def _quarantine(self, name: str, stored: StoredCommit, damaged: list[str]) -> None:
        gone = [key for key in damaged if not await self._executor.persistently(lambda key=key: list(self._store.list(key)))]
        reason = f"{damaged[0]}: {'missing in the store' if gone else 'not the object that its writer recorded'}"
        self._findings.add(name, stored.crc64nvme, reason, missing=damaged[0] if gone == damaged else None)
        self._events.happened("checkpoint_found_bad", level="error", checkpoint=name, reason=reason, hint=_HINT)
