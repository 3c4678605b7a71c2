"""Removal of checkpoints by a person: a single one, or those that the retention of the sidecar would delete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sidecar.catalog.events import Events
from sidecar.core.commit.retention import Deletion
from sidecar.core.commit.summary import StoredState
from sidecar.core.format import keys
from sidecar.core.format.checkpoint_address import misnamed
from sidecar.errors import NothingFound, RequestRefused
from sidecar.lifecycle.lease import Lease
from sidecar.repository.verification import Examined, Verifier
from sidecar.retention.known_steps import KnownSteps
from sidecar.retention.store_retention import RetentionPlan, StoreRetention
from sidecar.standalone.session import StoreSession
from sidecar.upload.commit.revocation import Revocation

NEWEST = "it is the newest checkpoint, from which a run would resume"

UPLOADING = "it has no commit, and a run may be uploading it"

STOP_FIRST = "stop the run, if there is one, and repeat this without --while-live"


@dataclass(frozen=True, slots=True)
class Removed:
    """A checkpoint that was deleted."""

    name: str
    objects: int
    size_bytes: int
    was_committed: bool


async def remove(session: StoreSession, name: str, *, lease: Lease | None) -> Removed:
    """Delete a checkpoint, also an uncommitted one, and abort its unfinished uploads.

    ``lease``: checked before each deletion. ``None``: a run may use the prefix, and the person knows; the newest committed
    checkpoint then stays.

    Raises:
        NothingFound: There is no such checkpoint.
        RequestRefused: It is the newest committed one, and a run may use the prefix.
        Fenced: A run has begun to use the prefix.
        StoreError: A request failed. The remaining objects are no checkpoint any more; a second call removes them.
    """
    verifier = Verifier(session.store, session.executor)
    found = await verifier.examine(name)
    if lease is None:
        await _require_unused(verifier, found)
    revocation = Revocation(session.store, session.executor, lease=lease)
    if lease is not None:
        await session.executor.persistently(_abort_uploads, session, name)
    there = await revocation.stored_commit(name)
    if not await revocation.remove(name, judged=there):
        raise RequestRefused(f"{session.store.url}/{name}: it was committed again meanwhile: look at it, and remove it again")
    return Removed(name, found.objects, found.size_bytes, there is not None)


async def _require_unused(verifier: Verifier, found: Examined) -> None:
    """Refuse what a run may need, if there is one: its newest checkpoint, and those that it may be uploading."""
    if found.state in (StoredState.INCOMPLETE, StoredState.FOREIGN):
        raise RequestRefused(f"{found.name}: {UPLOADING}: {STOP_FIRST}")
    if found.name == await verifier.newest_committed():
        raise RequestRefused(f"{found.name}: {NEWEST}: {STOP_FIRST}")


def _abort_uploads(session: StoreSession, name: str) -> None:
    for pending in list(session.store.pending_uploads(keys.folder(name))):
        session.store.abort_upload(pending.key, pending.upload_id)


@dataclass(frozen=True, slots=True)
class Pruning:
    """A retention plan, with what became of it."""

    kept: Mapping[str, str] = field(default_factory=dict)
    """Reason by name, newest first."""
    planned: Mapping[str, str] = field(default_factory=dict)
    """Reason by name, oldest first."""
    deleted: tuple[str, ...] = ()
    """Names of those that were deleted; empty for a dry run."""

    def fields(self, *, is_dry: bool) -> dict[str, Any]:
        """Return it as JSON shows it. ``is_dry``: the plan was not carried out."""
        gone = self.planned if is_dry else {name: self.planned[name] for name in self.deleted}
        return {
            "dry_run": is_dry,
            "kept": [{"checkpoint": name, "reason": reason} for name, reason in self.kept.items()],
            "deleted": [{"checkpoint": name, "reason": reason} for name, reason in gone.items()],
        }


class Pruner:
    """The retention of the sidecar, run once by a person."""

    def __init__(
        self, session: StoreSession, *, keep_newest: int, keep_every_steps: int | None, lease: Lease | None, is_idle: bool
    ) -> None:
        """Start without observations.

        Args:
            session: The store.
            keep_newest: As ``CKPT_KEEP_STORE``.
            keep_every_steps: As ``CKPT_KEEP_EVERY_STEPS``; ``None``: no such steps.
            lease: Checked before each deletion; ``None``: a run uses the prefix.
            is_idle: No run uses the prefix, or nothing is deleted: commits count without a delay.
        """
        self._retention = StoreRetention(
            session.store,
            session.executor,
            keep_newest=keep_newest,
            keep_every_steps=keep_every_steps,
            known=KnownSteps(is_idle=is_idle),
            events=Events(),
            lease=lease,
        )
        self._url = session.store.url

    async def plan(self, on_wait: Callable[[str], None]) -> tuple[RetentionPlan, Pruning]:
        """Return the plan, once the newest commits of a live run have settled. ``on_wait``: called with what is being done.

        Raises:
            NothingFound: No checkpoint is committed.
            StoreError: A request failed.
        """
        on_wait("reading commits")
        found = await self._retention.plan()
        if found.again_s is not None:
            on_wait("waiting until the newest commits have settled")
            await asyncio.sleep(found.again_s)
            found = await self._retention.plan()
        if not found.committed:
            raise NothingFound(f"{self._url}: no checkpoint is committed{misnamed(self._url)}")
        return found, Pruning(_by_step([*found.plan.retained, *found.plan.kept], found), _reasons(found.plan.deletions))

    async def carry_out(self, found: RetentionPlan, pruning: Pruning) -> Pruning:
        """Delete what the plan says.

        Raises:
            Fenced: A run has begun to use the prefix.
            StoreError: A request failed.
        """
        deleted = await self._retention.carry_out(found)
        return Pruning(pruning.kept, pruning.planned, tuple(deletion.name for deletion in deleted))


def _by_step(kept: list[Deletion], found: RetentionPlan) -> dict[str, str]:
    return _reasons(sorted(kept, key=lambda each: found.committed[each.name].step, reverse=True))


def _reasons(deletions: list[Deletion]) -> dict[str, str]:
    return {deletion.name: deletion.reason for deletion in deletions}
