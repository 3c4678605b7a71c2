"""Deletes what retention says, on the volume and in the store, and logs each deletion with its reason."""

from __future__ import annotations

import asyncio

import structlog

from sidecar.catalog import Catalog, Tracked
from sidecar.core import keys
from sidecar.core.resume import newest_first
from sidecar.core.retention import Kept, plan_local_deletion, plan_store_deletion
from sidecar.core.states import State
from sidecar.errors import StoreError
from sidecar.events import Events
from sidecar.resume.resuming import Resuming
from sidecar.settings import Settings
from sidecar.store.protocol import Store
from sidecar.transfer import Transfers
from sidecar.upload.committing import Committer
from sidecar.volume.volume import Volume
from trainer_hook.contract import META_OWNER, SCRIPT_OWNED, step_of

log = structlog.get_logger()

INTERVAL_S = 10.0


class Cleaner:
    """Runs after each commit and every ``INTERVAL_S``."""

    def __init__(
        self,
        *,
        settings: Settings,
        store: Store,
        volume: Volume,
        catalog: Catalog,
        transfers: Transfers,
        resuming: Resuming,
        events: Events,
    ) -> None:
        self._settings = settings
        self._store = store
        self._volume = volume
        self._catalog = catalog
        self._transfers = transfers
        self._resuming = resuming
        self._events = events
        self._committer = Committer(store, transfers)
        self._swept_at_step: int | None = None

    async def run(self) -> None:
        """Clean until cancelled."""
        while True:
            try:
                await self.clean_volume()
            except OSError as error:
                log.warning("volume_not_cleaned", error=str(error), hint="is the volume still mounted? It is tried again")
            if self._catalog.newest_durable_step != self._swept_at_step:
                self._swept_at_step = self._catalog.newest_durable_step
                try:
                    await self.clean_store()
                except StoreError as error:
                    log.warning("store_not_cleaned", error=str(error), hint="tried again after the next commit")
            try:
                async with asyncio.timeout(INTERVAL_S):
                    await self._catalog.changed()
            except TimeoutError:
                continue

    async def clean_volume(self) -> None:
        """Delete durable local checkpoints that are not to be kept."""
        await self._clean_volume(min_free_bytes=self._settings.min_free)

    async def make_room(self, wanted_bytes: int) -> list[str]:
        """Delete durable local checkpoints, oldest first, until so much is free. Returns their names.

        Raises:
            OSError: The volume cannot be asked.
        """
        return await self._clean_volume(min_free_bytes=wanted_bytes, keep_least=0)

    async def _clean_volume(self, *, min_free_bytes: int, keep_least: int = 1) -> list[str]:
        durable = [t for t in self._catalog.all() if t.state is State.COMMITTED and not _is_scripts(t)]
        plan = plan_local_deletion(
            [self._kept(t) for t in durable],
            keep_newest=self._settings.keep_local,
            free_bytes=self._volume.free_bytes(),
            min_free_bytes=min_free_bytes,
            keep_least=keep_least,
        )
        deleted = []
        versions = {t.name: t.version for t in durable}
        for deletion in plan:
            # Each deletion takes its time: what was written anew or handed out meanwhile is another thing than was planned.
            if deletion.name != self._resuming.in_use and self._is_there(deletion.name, versions[deletion.name]):
                await asyncio.to_thread(self._volume.delete, deletion.name)
                log.info("local_checkpoint_deleted", checkpoint=deletion.name, reason=deletion.reason)
                deleted.append(deletion.name)
        return deleted

    def _is_there(self, name: str, version: str) -> bool:
        return self._volume.marker_signature(name) == version

    def _kept(self, tracked: Tracked) -> Kept:
        checkpoint = tracked.checkpoint
        assert checkpoint is not None
        protected = "the run resumes from it" if tracked.name == self._resuming.in_use else None
        return Kept(tracked.name, checkpoint.resume_step, checkpoint.size_bytes, protected)

    async def clean_store(self) -> None:
        """Delete committed steps that are not to be kept, in the order of I4."""
        if self._settings.keep_store is None:
            return
        folders = await self._transfers.persistently(lambda: list(self._store.list_folders()))
        committed = [
            Kept(name, step_of(name), protected="the run resumes from it" if name == self._resuming.in_use else None)
            for name in newest_first(folders)
            if await self._is_sound(name)
        ]
        plan = plan_store_deletion(
            committed, keep_newest=self._settings.keep_store, keep_every_steps=self._settings.keep_every_steps
        )
        for deletion in plan:
            if deletion.name == self._resuming.in_use:  # asked for since the plan was made
                continue
            await self._committer.make_way(deletion.name)
            left = await self._transfers.persistently(self._keys, deletion.name)
            await self._transfers.persistently(self._store.delete, left)
            self._events.happened("store_checkpoint_deleted", checkpoint=deletion.name, reason=deletion.reason)

    async def _is_sound(self, name: str) -> bool:
        """Whether a checkpoint is committed, and nothing is known against this commit of it."""
        there = await self._committer.standing(name)
        return there is not None and there.commit is not None and not self._resuming.is_quarantined(name, there.crc64nvme)

    def _keys(self, name: str) -> list[str]:
        return [stored.key for stored in self._store.list(keys.folder(name))]


def _is_scripts(tracked: Tracked) -> bool:
    """Whether the training script rotates it itself: such checkpoints are neither counted nor deleted."""
    return tracked.checkpoint is not None and tracked.checkpoint.meta.get(META_OWNER) == SCRIPT_OWNED
