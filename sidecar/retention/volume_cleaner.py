"""Retention on the volume: executes the plans, and logs each deletion with its reason."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import structlog

from sidecar.catalog.catalog import Catalog, Tracked
from sidecar.core.commit.retention import Kept, PendingCopy, plan_local_deletion, plan_release
from sidecar.core.lifecycle.states import State
from sidecar.daemon.settings import Settings
from sidecar.download.local_copies import LocalCopies
from sidecar.download.resume_service import ResumeService
from sidecar.retention.store_retention import IN_USE
from sidecar.tasks import within
from sidecar.volume.volume import Volume
from trainer_hook.contract import is_script_owned

log = structlog.get_logger()

CLEAN_INTERVAL_S = 10.0

_NOT_DELETED = "run the sidecar as the trainer's user (--run-as-user); it is tried again"

_RELEASED = "the trainer deleted it before it was durable, a newer one is finished, and the volume has no space for the next"


class VolumeCleaner:
    """The service deletes checkpoints from the volume after each change, every ``CLEAN_INTERVAL_S`` seconds, and on request."""

    def __init__(
        self,
        *,
        settings: Settings,
        volume: Volume,
        catalog: Catalog,
        resume_service: ResumeService,
        local: LocalCopies,
    ) -> None:
        self._settings = settings
        self._volume = volume
        self._catalog = catalog
        self._resume_service = resume_service
        self._local = local
        self._cleaning = asyncio.Lock()
        """Held for one plan and its deletions: a second plan would count the same checkpoints."""
        self._refusals: dict[str, int | None] = {}
        """Error numbers of the checkpoints that could not be deleted, by name, as they were logged last."""

    async def run(self) -> None:
        """Clean until cancelled."""
        while True:
            try:
                await self.clean_volume()
            except OSError as error:
                log.warning("volume_not_cleaned", error=str(error), hint="is the volume still mounted? It is tried again")
            await within(CLEAN_INTERVAL_S, self._catalog.changed())

    async def clean_volume(self) -> None:
        """Delete the durable local checkpoints that retention does not keep, and keep space for the next save."""
        newest = self._catalog.newest_finished()
        next_bytes = newest.size_bytes if newest is not None else 0
        async with self._cleaning:
            await asyncio.to_thread(self._volume.pins.remove_rest)
            await self._delete_surplus(min_free_bytes=self._settings.min_free, keep_least=1)
            await self._release_pins(max(self._settings.min_free, next_bytes + next_bytes // 10))

    async def make_room(self, wanted_bytes: int) -> list[str]:
        """Delete durable local checkpoints, oldest first, until ``wanted_bytes`` are free. Returns their names.

        If that is not enough, the pins of older ones that the trainer has deleted are released; their names are returned, too.

        Raises:
            OSError: The volume's free space cannot be read.
        """
        async with self._cleaning:
            deleted = await self._delete_surplus(min_free_bytes=wanted_bytes, keep_least=0)
            return deleted + await self._release_pins(wanted_bytes)

    async def _delete_surplus(self, *, min_free_bytes: int, keep_least: int) -> list[str]:
        deleted: list[str] = []
        refused: set[str] = set()
        while True:
            refused_before = len(refused)
            committed = [t for t in self._catalog.all() if t.state is State.COMMITTED]
            durable = [t for t in committed if not (t.checkpoint and is_script_owned(t.checkpoint.meta))]
            versions = {t.name: t.version for t in durable if t.name not in deleted}
            plan = plan_local_deletion(
                [self._kept(t, refused) for t in durable if t.name in versions],
                keep_newest=self._settings.local_copies,
                free_bytes=self._volume.free_bytes(),
                min_free_bytes=min_free_bytes,
                keep_least=keep_least,
            )
            for name, reason in ((planned.name, planned.reason) for planned in plan):
                # Deletions take time: one that was rewritten or given to a resume meanwhile is no longer planned.
                if not self._resume_service.is_in_use(name) and self._is_there(name, versions[name]):
                    if await self._delete(name, reason):
                        deleted.append(name)
                    else:
                        refused.add(name)
            if len(refused) == refused_before:  # otherwise a new plan: other checkpoints have to make the room
                return deleted

    async def _release_pins(self, wanted_bytes: int) -> list[str]:
        """Release pins of older checkpoints that the trainer has deleted and that are not durable. Returns their names."""
        pending = {t.name: t for t in self._catalog.pending() if t.state is not State.UPLOADED}
        free_bytes = await asyncio.to_thread(self._volume.free_bytes)
        if free_bytes >= wanted_bytes or len(pending) < 2:
            return []
        later = {name: self._catalog.finished_later(tracked, pending.values()) for name, tracked in pending.items()}
        copies = [await asyncio.to_thread(self._copy_of, tracked, later[name]) for name, tracked in pending.items()]
        plan = plan_release(copies, free_bytes=free_bytes, wanted_bytes=wanted_bytes)
        return [copy.name for copy in plan if await self._release(pending[copy.name])]

    async def _release(self, tracked: Tracked) -> bool:
        # Since the plan it may have become durable, or this node's part of it: that is worth more than the space.
        if tracked.checkpoint is None or tracked.state is State.UPLOADED or not self._catalog.is_current(tracked):
            return False
        self._catalog.supersede(tracked, _RELEASED)
        await asyncio.to_thread(self._volume.pins.release, tracked.checkpoint)
        return True

    def _copy_of(self, tracked: Tracked, later: int) -> PendingCopy:
        checkpoint = tracked.checkpoint
        assert checkpoint is not None
        return PendingCopy(
            tracked.name,
            tracked.marked_at_s,
            checkpoint.size_bytes,
            is_deleted=self._is_deleted(tracked.name),
            is_sending=tracked.state is not State.FINISHED,
            is_shared=checkpoint.node.count > 1,
            later=later,
        )

    def _is_deleted(self, name: str) -> bool:
        """Whether a checkpoint's directory is gone. One that cannot be read now is not."""
        try:
            (self._volume / name).status()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return False

    async def _delete(self, name: str, reason: str) -> bool:
        try:
            with self._local.deleting(name):
                await asyncio.to_thread(self._volume.delete, name)
        except OSError as error:
            if self._refusals.get(name) != error.errno:  # it is tried again every few seconds
                log.warning("local_checkpoint_not_deleted", checkpoint=name, error=str(error), hint=_NOT_DELETED)
            self._refusals[name] = error.errno
            return False
        self._refusals.pop(name, None)
        log.info("local_checkpoint_deleted", checkpoint=name, reason=reason)
        return True

    def _is_there(self, name: str, version: str) -> bool:
        return self._volume.marker_version(name) == version

    def _kept(self, tracked: Tracked, refused: Collection[str]) -> Kept:
        checkpoint = tracked.checkpoint
        assert checkpoint is not None
        protected = IN_USE if self._resume_service.is_in_use(tracked.name) else None
        protected = "it cannot be deleted" if tracked.name in refused else protected
        return Kept(tracked.name, checkpoint.resume_step, checkpoint.size_bytes, protected)
