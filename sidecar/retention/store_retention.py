"""Retention in the store: deletes old checkpoints once enough newer commits were verified as whole (FORMAT.md, I7)."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import structlog

from sidecar.catalog.events import Events
from sidecar.core.commit.resume import newest_first
from sidecar.core.commit.retention import Deletion, StorePlan, plan_store_deletion, surplus_steps
from sidecar.core.commit.training_line import Committed, origin_of, present_line
from sidecar.core.format import keys
from sidecar.errors import UnusableNow
from sidecar.lifecycle.lease import Lease
from sidecar.retention.known_steps import KnownSteps
from sidecar.store.protocol import Store
from sidecar.transfer.clock import Clock
from sidecar.transfer.executor import SPARE_THREADS, StoreExecutor
from sidecar.upload.commit.post_commit_check import AFTER_S, POLL_S
from sidecar.upload.commit.revocation import Justified, Revocation
from trainer_hook.contract import step_of, train_call_of

log = structlog.get_logger()

SETTLED_S = AFTER_S[-1][0] + 2 * POLL_S
"""Age of a commit in seconds, from its first sight, at which it counts: by then its post-commit checks have ended."""
WHOLE_FOR_S = 300.0
"""Seconds for which a verification of a commit is valid. Before a deletion, commits are always verified again."""
COMPARED_FOR_S = 5.0
"""Seconds for which a verification of the commits that count is valid during deletions."""
MANY = 1000
"""Number of commits from which they are ordered and judged in a thread, so that the event loop answers probes meanwhile."""
READ_AT_ONCE = 500
"""Maximum number of commits read concurrently: each document takes memory."""
DELETE_AT_ONCE = SPARE_THREADS - 1
"""Maximum number of checkpoints deleted concurrently, with one request each: one thread stays free for commits."""
READ_AGAIN = 16
"""Number of known commits that each run reads again, the one read longest ago first: a store may hold tens of thousands."""

IN_USE = "the run resumes from it"

T = TypeVar("T")

CommitId = tuple[str, str]
"""A commit: name and checksum."""


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """A plan with its input."""

    plan: StorePlan
    committed: Mapping[str, Committed]
    """All readable commits of steps, by name."""
    whole: Mapping[str, str]
    """Checksums of the commits that count as newer ones, by name."""
    again_s: float | None
    """Seconds until another check may delete more; ``None``: after the next commit."""
    uncommitted: Sequence[str] = ()
    """Names of the steps in the store without a readable commit."""


class DeletionsUnderWay:
    """Counts deletions in progress, so that the end of the sidecar can wait for them and prevent further ones."""

    def __init__(self) -> None:
        self._count = 0
        self._is_ending = False
        self._ended = asyncio.Event()
        self._ended.set()

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[bool]:
        """Surround one deletion, which ``end`` waits for. Yields False if it must not begin: ``end`` was called."""
        if self._is_ending:
            yield False
            return
        self._count += 1
        self._ended.clear()
        try:
            yield True
        finally:
            self._count -= 1
            if not self._count:
                self._ended.set()

    async def end(self) -> None:
        """Let no further deletion begin, and return when those under way have ended."""
        self._is_ending = True
        await self._ended.wait()


class StoreRetention:
    """Retention of one node. All nodes apply the same rule to the same documents, so concurrent runs have the same result."""

    def __init__(
        self,
        store: Store,
        executor: StoreExecutor,
        *,
        keep_newest: int,
        keep_every_steps: int | None,
        known: KnownSteps,
        events: Events,
        lease: Lease | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Start without observations.

        Args:
            store: The store.
            executor: Runs the requests.
            keep_newest: ``CKPT_KEEP_STORE``.
            keep_every_steps: ``CKPT_KEEP_EVERY_STEPS``; ``None``: no such steps.
            known: What this node knows of steps.
            events: Where deletions are recorded.
            lease: Checked before each deletion; ``None``: no other pod is there.
            clock: Time.
        """
        self._store = store
        self._executor = executor
        self._keep_newest = keep_newest
        self._keep_every_steps = keep_every_steps
        self._known = known
        self._events = events
        self._clock = clock or Clock()
        self._revocation = Revocation(store, executor, lease=lease)
        self._seen_s: dict[CommitId, float] = {}
        """Time of each commit's first sight."""
        self._whole_s: dict[CommitId, float] = {}
        """Time of each commit's last successful verification."""
        self._logged: set[tuple[CommitId, str]] = set()
        """Kept commits and reasons that were already logged."""
        self._read_before: dict[str, Committed] = {}
        """Commits in memory, by name, in the order in which they were read."""
        self._written: set[str] = set()
        """Names of commits written since the latest reading began: what was read of them may be stale."""
        self._under_way = DeletionsUnderWay()
        self._settled_s = 0.0 if known.is_idle else SETTLED_S

    def written(self, name: str) -> None:
        """Forget what was read of a commit: it has been written."""
        self._read_before.pop(name, None)
        self._written.add(name)

    async def end(self) -> None:
        """Begin no further deletion, and return when those under way have ended."""
        await self._under_way.end()

    async def run_once(self) -> float | None:
        """Delete the checkpoints that retention does not keep.

        Returns:
            Seconds until the next useful check; ``None``: after the next commit.

        Raises:
            StoreError: The store refused a request.
        """
        found = await self.plan()
        if found.plan.deletions:
            await self.carry_out(found)
        await self._finish(found.uncommitted)
        if found.again_s is None:
            self._tell(found.plan, found.committed)
        return found.again_s

    async def plan(self) -> RetentionPlan:
        """Return the deletions that retention would make now, after the commits that justify them were verified again.

        Raises:
            StoreError: The store refused a request.
        """
        names = newest_first(await self._executor.persistently(lambda: list(self._store.list_folders())))
        found = await self._commits(names)
        now_s = self._clock.monotonic()  # taken after the reads: commits made meanwhile must not look older than they are
        committed = {c.name: replace(c, seen_s=self._seen_s.setdefault((c.name, c.crc64nvme), now_s)) for c in found}
        uncommitted = [name for name in names if name not in committed]
        self._forget_all_but({(commit.name, commit.crc64nvme) for commit in committed.values()})
        steps = [commit.step for commit in committed.values()]
        if not surplus_steps(steps, keep_newest=self._keep_newest, keep_every_steps=self._keep_every_steps):
            retained = (await self._plan(committed, {}, [])).retained
            return RetentionPlan(StorePlan([], [], retained), committed, {}, None, uncommitted)
        line = await _decided(functools.partial(present_line, list(committed.values())), of=len(committed))
        whole, again_s = await self._seen_whole(line, not_before_s=now_s - WHOLE_FOR_S)
        plan = await self._plan(committed, whole, line)
        if planned := {deletion.name for deletion in plan.deletions}:
            # A deletion is final: the commits that count are verified again, and ordered by the store's clock.
            whole, again_s = await self._seen_whole(line, not_before_s=now_s)
            committed |= await self._with_times({*planned, *whole}, committed)
            plan = await self._plan(committed, whole, line)
            plan = replace(plan, deletions=[deletion for deletion in plan.deletions if deletion.name in planned])
        return RetentionPlan(plan, committed, whole, again_s, uncommitted)

    async def carry_out(self, found: RetentionPlan) -> list[Deletion]:
        """Delete what a plan says, unless its commits have changed since; return the deletions that were made.

        Raises:
            Fenced: A later pod of the job has taken the prefix over.
            StoreError: The store refused a request.
        """
        if not await self._are_still_committed(found.whole):
            return []
        planned, deleted, is_justified = found.plan.deletions, list[Deletion](), self._justified(found)
        for some in _groups(planned, DELETE_AT_ONCE):
            done = await self._executor.together(
                [self._delete(each, found.committed[each.name], is_justified) for each in some]
            )
            deleted += itertools.compress(some, done)
        return deleted

    def _justified(self, found: RetentionPlan) -> Justified:
        """Return a check that the commits for which others are deleted are still whole; they were a moment ago."""
        compared_s = self._clock.monotonic()

        async def are_whole() -> bool:
            nonlocal compared_s
            if (now_s := self._clock.monotonic()) - compared_s > COMPARED_FOR_S:
                for name in found.whole:
                    if not await self._is_whole(found.committed[name], now_s):
                        return False
                compared_s = now_s
            return True

        return are_whole

    async def _finish(self, uncommitted: Sequence[str]) -> None:
        """Finish the deletions that a process began and did not end."""
        for some in _groups([name for name in uncommitted if not self._known.is_pending(name)], DELETE_AT_ONCE):
            await self._executor.together([self._finish_one(name) for name in some])

    async def _finish_one(self, name: str) -> None:
        async with self._under_way.begin() as may_begin:
            if may_begin and await self._revocation.finish_removal(name):
                self._events.happened("store_deletion_finished", checkpoint=name)

    async def _plan(self, committed: Mapping[str, Committed], whole: Mapping[str, str], line: Iterable[Committed]) -> StorePlan:
        plan = functools.partial(
            plan_store_deletion,
            list(committed.values()),
            whole=whole,
            keep_newest=self._keep_newest,
            keep_every_steps=self._keep_every_steps,
            protected=dict.fromkeys(self._known.in_use(), IN_USE),
            line=line,
        )
        return await _decided(plan, of=len(committed))

    async def _commits(self, names: Sequence[str]) -> list[Committed]:
        """Return all readable commits.

        Most known commits are taken from memory: otherwise each new commit would cost a read of all. Such a copy is stale only
        if another pod has replaced the commit. So commits are read again before they are deleted or justify a deletion.
        """
        present = set(names)
        known = {name: commit for name, commit in self._read_before.items() if name in present}
        settled = [name for name in known if not self._known.may_be_rewritten(name)]
        kept = {name: known[name] for name in settled[READ_AGAIN:]}  # those before were read longest ago
        self._written.clear()
        found, unread = kept, [name for name in names if name not in kept]
        for some in _groups(unread, READ_AT_ONCE):
            read = await self._executor.together([self._read(name) for name in some])
            found |= {commit.name: commit for commit in read if commit is not None}
        self._read_before = {name: commit for name, commit in found.items() if name not in self._written}
        return list(found.values())

    async def _read(self, name: str) -> Committed | None:
        """Return the few fields of a commit that retention needs; large jobs' documents would not fit into memory together."""
        try:
            stored, step = await self._revocation.stored_commit(name), step_of(name)
        except UnusableNow:  # as any unreadable commit: it stays, and does not count
            return None
        if stored is None or stored.commit is None or step is None:
            return None
        commit = stored.commit
        origin, call = origin_of(commit.meta), train_call_of(commit.meta)
        return Committed(
            name, step, commit.attempt, commit.created_at, origin, stored.crc64nvme, epoch=commit.epoch, train_call=call
        )

    def _forget_all_but(self, present: set[CommitId]) -> None:
        self._seen_s = {commit_id: at_s for commit_id, at_s in self._seen_s.items() if commit_id in present}
        self._whole_s = {commit_id: at_s for commit_id, at_s in self._whole_s.items() if commit_id in present}
        self._logged = {(commit_id, reason) for commit_id, reason in self._logged if commit_id in present}

    async def _with_times(self, names: Collection[str], committed: Mapping[str, Committed]) -> dict[str, Committed]:
        """Return commits with their write times by the store's clock."""
        listed = await self._executor.together([self._modified(name) for name in names])
        return {name: replace(committed[name], modified=modified) for name, modified in zip(names, listed, strict=True)}

    async def _modified(self, name: str) -> str:
        key = keys.commit(name)
        found = await self._executor.persistently(lambda: list(self._store.list(key)))
        return next((stored.modified for stored in found if stored.key == key), "")

    async def _seen_whole(self, line: Iterable[Committed], *, not_before_s: float) -> tuple[dict[str, str], float | None]:
        """Return the newest whole commits of the line, as many as are to be kept: checksum by name.

        Also returns the seconds until the first too young one counts; ``None``: none is too young.

        Args:
            line: The present training line, newest step first.
            not_before_s: Earliest verification that is still valid, monotonic seconds.
        """
        whole: dict[str, str] = {}
        again_s: float | None = None
        for commit in line:
            left_s = commit.seen_s + self._settled_s - self._clock.monotonic()
            if left_s > 0:
                again_s = left_s if again_s is None else min(again_s, left_s)
            elif await self._is_whole(commit, not_before_s):
                whole[commit.name] = commit.crc64nvme
                if len(whole) == self._keep_newest:
                    break
        return whole, again_s

    async def _is_whole(self, commit: Committed, not_before_s: float) -> bool:
        commit_id = commit.name, commit.crc64nvme
        if self._known.is_quarantined(*commit_id):
            return False
        seen_s = self._whole_s.get(commit_id)
        if seen_s is not None and seen_s >= not_before_s:
            return True
        looked_s = self._clock.monotonic()
        stored = await self._revocation.stored_commit(commit.name)
        if stored is None or stored.commit is None or stored.crc64nvme != commit.crc64nvme:
            return False
        try:
            why_not = await self._revocation.why_not_whole(stored.commit, commit.crc64nvme)
        except UnusableNow as archived:
            why_not = str(archived)
        self._whole_s.pop(commit_id, None)
        if why_not is None:
            self._whole_s[commit_id] = looked_s
        elif (commit_id, why_not) not in self._logged:
            self._logged.add((commit_id, why_not))
            log.warning(
                "committed_checkpoint_not_whole", checkpoint=commit.name, reason=why_not, hint="it does not count as kept"
            )
        return why_not is None

    async def _are_still_committed(self, whole: Mapping[str, str]) -> bool:
        """Whether the commits for which others are deleted were neither revoked nor replaced meanwhile."""
        stored = await self._executor.together([self._revocation.stored_commit(name) for name in whole])
        return [found and found.crc64nvme for found in stored] == list(whole.values())

    async def _delete(self, deletion: Deletion, commit: Committed, is_justified: Justified) -> bool:
        async def is_wanted() -> bool:
            return await is_justified() and deletion.name not in self._known.in_use()  # a resume may have begun meanwhile

        async with self._under_way.begin() as may_begin:
            stored = await self._revocation.stored_commit(deletion.name) if may_begin else None
            is_judged = stored is not None and stored.crc64nvme == commit.crc64nvme
            if not is_judged or deletion.name in self._known.in_use():  # changed since the plan was made
                return False
            if not await self._revocation.remove(deletion.name, judged=stored, is_justified=is_wanted):
                return False
            self._events.happened("store_checkpoint_deleted", checkpoint=deletion.name, reason=deletion.reason)
            return True

    def _tell(self, plan: StorePlan, committed: Mapping[str, Committed]) -> None:
        for kept in plan.kept:
            kept_reason = (kept.name, committed[kept.name].crc64nvme), kept.reason
            if kept_reason not in self._logged:
                self._logged.add(kept_reason)
                log.info("store_checkpoint_kept", checkpoint=kept.name, reason=kept.reason)


def _groups(items: Sequence[T], count: int) -> Iterator[Sequence[T]]:
    """Yield the items in groups of ``count``; the last one may be smaller."""
    return (items[at : at + count] for at in range(0, len(items), count))


async def _decided(decide: Callable[[], T], *, of: int) -> T:
    """Return a decision about ``of`` commits; from ``MANY`` on it is made in a thread."""
    return await asyncio.to_thread(decide) if of >= MANY else decide()
