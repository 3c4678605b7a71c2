"""Aborts orphan multipart uploads: no pod continues them, and their parts cost storage."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import structlog

from sidecar.catalog.catalog import Catalog
from sidecar.core.lifecycle.orphan_uploads import is_orphan, quiet_s
from sidecar.errors import NotFound, StoreError
from sidecar.lifecycle.deadline import Deadline
from sidecar.store.protocol import PendingUpload, Store
from sidecar.transfer.executor import StoreExecutor
from sidecar.upload.send.journal import Journal
from sidecar.volume.volume import Volume

log = structlog.get_logger()

SCAN_INTERVAL_S = 6 * 3600.0
"""Interval of scans in seconds: uploads that were too young at the start are found later. A scan takes one request, and one
for each upload that is old enough to be an orphan."""


MOST_NAMED = 8
"""Maximum number of keys that a warning names."""


class OrphanUploads:
    """Scans at the start and periodically; not after a termination notice."""

    def __init__(
        self, store: Store, executor: StoreExecutor, volume: Volume, catalog: Catalog, deadline: Deadline, *, alone: bool
    ) -> None:
        """Start. ``volume`` holds this node's journals; ``alone``: this node is the whole job."""
        self._store = store
        self._executor = executor
        self._volume = volume
        self._alone = alone
        self._catalog = catalog
        self._deadline = deadline

    async def run(self) -> None:
        """Scan until cancelled."""
        while True:
            if not self._deadline.is_set():
                await self.scan()
            await asyncio.sleep(SCAN_INTERVAL_S)

    async def scan(self) -> None:
        """Abort the present orphans. One that the store refuses to abort is passed over."""
        spared, refused = 0, dict[str, StoreError]()
        try:
            # Journals are read before the listing: an upload that begins in between is too young to be an orphan.
            continued, given_up = await asyncio.to_thread(_known, self._volume)
            for upload in await self._executor.once(lambda: list(self._store.pending_uploads(""))):
                try:
                    is_spared = not await self._abort_orphan(upload, continued, given_up)
                    spared += is_spared and upload.upload_id not in continued
                except StoreError as error:
                    if error.transient:  # the store is away: the others would wait for their answers, too
                        raise
                    refused.setdefault(upload.key, error)
        except (StoreError, OSError) as error:
            _say_not_aborted(error)
        if refused:
            _say_not_aborted(next(iter(refused.values())), uploads=len(refused), keys=list(refused)[:MOST_NAMED])
        if spared:
            log.info("unfinished_uploads_spared", uploads=spared, reason="another pod may be sending them")

    async def _abort_orphan(self, upload: PendingUpload, continued: frozenset[str], given_up: frozenset[str]) -> bool:
        """Abort an upload if it is an orphan; return whether it was one."""
        silent_s = quiet_s(listed_at_s=upload.listed_at_s, begun_at_s=upload.begun_at_s)
        # Parts are listed only if they can change the decision.
        if not self._is_orphan(upload, silent_s, continued, given_up):
            return False
        if not self._is_orphan(upload, await self._executor.once(self._quiet_s, upload), continued, given_up):
            return False
        with suppress(NotFound):  # completed or aborted since the listing
            await self._executor.once(self._store.abort_upload, upload.key, upload.upload_id)
        log.info("orphan_upload_aborted", key=upload.key, quiet_s=silent_s and round(silent_s))
        return True

    def _is_orphan(
        self, upload: PendingUpload, silent_s: float | None, continued: frozenset[str], given_up: frozenset[str]
    ) -> bool:
        return is_orphan(
            upload.key,
            upload.upload_id,
            quiet_s=silent_s,
            continued=continued,
            given_up=given_up,
            alone=self._alone,
            newest_committed_step=self._catalog.newest_durable_step,
        )

    def _quiet_s(self, upload: PendingUpload) -> float | None:
        """Return the seconds since the last progress of an upload, including its parts; ``None``: unknown. Blocks."""
        try:
            parts = [part.stored_at_s for part in self._store.list_parts(upload.key, upload.upload_id)]
        except NotFound:  # completed or aborted since the listing
            return None
        return quiet_s(listed_at_s=upload.listed_at_s, begun_at_s=upload.begun_at_s, parts_stored_at_s=parts)


def _say_not_aborted(error: Exception, **passed_over: Any) -> None:
    hint = "the next start tries it again, and a lifecycle rule does it, too"  # orphans cost storage, never a checkpoint
    log.warning("orphan_uploads_not_aborted", error=str(error), **passed_over, hint=hint)


def _known(volume: Volume) -> tuple[frozenset[str], frozenset[str]]:
    """Return the ids of the uploads that the journals continue, and of those that they abandoned. Blocks."""
    found = [Journal(place) for place in volume.journals()]
    continued = frozenset(upload.upload_id for journal in found for upload in journal.uploads.values())
    return continued, frozenset(upload.upload_id for journal in found for upload in journal.void)
