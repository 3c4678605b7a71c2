"""Checkpoints on the volume: those that a run can resume from without a download, and those that a download may replace."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import structlog

from sidecar.catalog.catalog import Catalog, Tracked
from sidecar.core.commit.resume import (
    differs_from_its_commit,
    is_outdated,
    matches_train_call,
    may_replace,
    may_replace_beside_trainer,
)
from sidecar.core.format.found_checkpoint import Finished
from sidecar.core.format.manifest import Commit
from sidecar.core.lifecycle.states import PENDING, State
from sidecar.download.store_reader import StoreReader
from sidecar.errors import RefusedObject, UnusableNow
from sidecar.transfer.executor import refusals_judged
from sidecar.volume.boot import boot_id
from sidecar.volume.volume import Volume
from trainer_hook.contract import ContractError, was_downloaded_in

log = structlog.get_logger()


class LocalCopies:
    """Selects checkpoints of the catalog for a resume, except those that are being deleted from the volume."""

    def __init__(self, volume: Volume, catalog: Catalog, reader: StoreReader, *, nodes: int) -> None:
        """``nodes``: of the job as it is now."""
        self._volume = volume
        self._catalog = catalog
        self._reader = reader
        self._nodes = nodes
        self._deletions: dict[str, asyncio.Event] = {}
        """Events of deletions in progress, by name; each is set at the end of its deletion."""

    @contextmanager
    def deleting(self, name: str) -> Iterator[None]:
        """Surround the deletion of a checkpoint from the volume: no request uses the checkpoint meanwhile."""
        ended = self._deletions[name] = asyncio.Event()
        try:
            yield
        finally:
            del self._deletions[name]
            ended.set()

    async def deletion_ended(self, name: str) -> None:
        """Return once no deletion of a checkpoint is under way."""
        if (ended := self._deletions.get(name)) is not None:
            await ended.wait()

    async def newest(self, train_call: int | None, *, restored: bool = False, committed: Sequence[str] = ()) -> Tracked | None:
        """Return the newest checkpoint on the volume that can be used as it is, or ``None``.

        It qualifies only if this node is the whole job and was when it was saved; all others are compared with the store first.

        Args:
            train_call: Only checkpoints of this ``train()`` call; ``None``: of any.
            restored: Also accept checkpoints downloaded and verified before, for an unreachable store; not by an earlier run
                of the kernel, which may have ended before their bytes were on the disk.
            committed: Names that are compared with their commit in the store.
        """
        if self._nodes > 1:  # the other nodes have none of it
            return None
        boot = await asyncio.to_thread(boot_id)
        usable = [
            t
            for t in self._catalog.all()
            if t.checkpoint is not None
            and (t.state in PENDING or t.state is State.COMMITTED or _lost_its_commit(t.state, t.checkpoint))
            and t.checkpoint.resume_step is not None
            and t.checkpoint.node.count == 1
            and not t.checkpoint.is_partial
            and (t.checkpoint.restored_from is None or (restored and was_downloaded_in(t.checkpoint.meta, boot)))
            and matches_train_call(t.checkpoint.meta, train_call)
        ]
        for tracked in sorted(usable, key=step_of_local, reverse=True):
            assert tracked.checkpoint is not None
            unchanged = await asyncio.to_thread(self._volume.is_unchanged, tracked.checkpoint)
            commit = await self._commit_beside(tracked) if unchanged and tracked.name in committed else None
            outdated = commit is not None and is_outdated(tracked.checkpoint, commit)
            torn = not unchanged or (commit is not None and differs_from_its_commit(tracked.checkpoint, commit))
            if not (torn or outdated) and tracked.name not in self._deletions:
                return tracked
            hint = "files were changed or deleted since it was finished" if torn else "a later attempt has committed this step"
            log.warning("local_checkpoint_not_used", checkpoint=tracked.name, hint=hint)
        return None

    def is_of_another_call(self, name: str, train_call: int | None) -> bool:
        """Whether a checkpoint of this volume belongs to another ``train()`` call, and may be on its way to the store."""
        local = self._catalog.get(name)
        return local is not None and local.checkpoint is not None and not matches_train_call(local.checkpoint.meta, train_call)

    def is_replaceable(self, commit: Commit, *, is_chosen: bool) -> bool:
        """Whether a download may replace what the volume has under the commit's name now; see ``may_replace``."""
        known = self._catalog.get(commit.name)
        is_known = self._volume.marker_version(commit.name) in (None, known.version if known else None)
        local = known.checkpoint if known else None
        is_superseded = known is not None and known.state is State.SUPERSEDED
        is_superseded = is_superseded or (local is not None and is_outdated(local, commit))
        return is_known and may_replace(local, commit, is_chosen=is_chosen, is_superseded=is_superseded)

    async def is_free_beside_trainer(self, name: str) -> bool:
        """Whether the checkpoint's directory can be replaced safely while the trainer is running."""
        if self._volume.fingerprint(name) is None:
            return True
        known = self._catalog.get(name)
        local = known.checkpoint if known else None
        is_unchanged = local is not None and await asyncio.to_thread(self._volume.is_unchanged, local)
        return may_replace_beside_trainer(local, is_unchanged=is_unchanged)

    async def _commit_beside(self, local: Tracked) -> Commit | None:
        """Return the commit in the store to compare a checkpoint with: it may have other files, or be a later attempt's.

        Files that were deleted before this sidecar process started leave no trace on the volume.
        """
        if local.state is State.COMMITTED:  # committed by this process, from these files
            return None
        reader = await self._reader.once_open()
        try:
            with refusals_judged(reader.patience(is_short=False).refusals):
                found = await reader.commit(local.name)
        except (ContractError, UnusableNow, RefusedObject):
            return None
        return None if found is None else found[0]


def step_of_local(tracked: Tracked) -> int:
    """Return the step of a checkpoint on the volume; -1: it has none."""
    return tracked.checkpoint.step if tracked.checkpoint and tracked.checkpoint.step is not None else -1


def _lost_its_commit(state: State, checkpoint: Finished) -> bool:
    """Whether a downloaded checkpoint is no longer committed in the store. Its files are still valid."""
    return state is State.SUPERSEDED and checkpoint.restored_from is not None
