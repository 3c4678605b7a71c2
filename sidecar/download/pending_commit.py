"""A commit that the job may be about to write: this node's part is on the volume, and the others may have theirs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from sidecar.catalog.catalog import Catalog
from sidecar.core.commit.resume import may_replace
from sidecar.core.format.found_checkpoint import Finished
from sidecar.core.format.manifest import Commit
from sidecar.core.lifecycle.states import NEVER_DURABLE, PENDING

log = structlog.get_logger()

PATIENCE_S = 15.0
"""Longest wait of a resume request for a pending commit, in seconds."""
POLL_S = 0.5


class PendingCommits:
    """What a job of several nodes may be about to commit; a node alone continues from its volume instead."""

    def __init__(self, catalog: Catalog, *, nodes: int) -> None:
        """``nodes``: of the job as it is now. Fewer may have saved what is on the volume."""
        self._catalog = catalog
        self._nodes = nodes

    def names(self) -> list[str]:
        """Return the names of which a commit is pending, whether or not the store has one already."""
        parts = [tracked.checkpoint for tracked in self._catalog.pending() if tracked.checkpoint is not None]
        return [part.name for part in parts if self._is_awaited(part) and part.resume_step is not None]

    def is_pending(self, name: str, commit: Commit | None) -> bool:
        """Whether the volume holds this node's part of what the job may be about to commit under a name.

        ``commit``: the present commit, of an earlier attempt; ``None``: there is none.
        """
        known = self._catalog.get(name)
        if known is None or known.checkpoint is None or not self._is_awaited(known.checkpoint):
            return False
        if commit is None:
            return known.state in PENDING
        return known.state not in NEVER_DURABLE and not may_replace(known.checkpoint, commit, is_chosen=False)

    async def changed(
        self,
        name: str,
        commit: Commit | None,
        crc: str | None,
        *,
        committed_crc: Callable[[str], Awaitable[str | None]],
        asked_s: float,
    ) -> bool:
        """Wait while a commit is pending. Returns whether something else than ``commit`` is committed now, or nothing.

        Args:
            name: The checkpoint.
            commit: The known commit; ``None``: there was none.
            crc: CRC64NVME of the document of ``commit``.
            committed_crc: Returns the CRC64NVME of the present commit of a name; ``None``: there is none.
            asked_s: Time of the request, monotonic seconds; the wait ends ``PATIENCE_S`` later.
        """
        until_s = asked_s + PATIENCE_S
        if not self.is_pending(name, commit) or time.monotonic() >= until_s:
            return False
        log.info("resume_waits", checkpoint=name, reason="the job may be about to commit its parts of it")
        now_crc = crc
        while self.is_pending(name, commit) and now_crc in (crc, None) and time.monotonic() < until_s:
            await asyncio.sleep(POLL_S)
            now_crc = await committed_crc(name)
        return now_crc != crc

    def _is_awaited(self, part: Finished) -> bool:
        return max(self._nodes, part.node.count) > 1
