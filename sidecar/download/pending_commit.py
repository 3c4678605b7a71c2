"""Commits that the job may be about to write: this node's part is on the volume, and other nodes may have theirs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from sidecar.catalog.catalog import Catalog
from sidecar.core.commit.resume import may_replace
from sidecar.core.format.manifest import Commit
from sidecar.core.lifecycle.states import PENDING

PATIENCE_S = 15.0
"""Longest wait of a resume request for a pending commit, in seconds."""
POLL_S = 0.5


def pending_names(catalog: Catalog) -> list[str]:
    """Return the names whose commit may be pending, whether or not the store has an earlier one."""
    parts = [tracked.checkpoint for tracked in catalog.pending() if tracked.checkpoint is not None]
    return [part.name for part in parts if part.node.count > 1 and part.resume_step is not None]


def is_pending(catalog: Catalog, name: str, commit: Commit | None) -> bool:
    """Whether the volume holds this node's part of what the job may be about to commit under a name.

    ``commit``: the present commit, of an earlier attempt; ``None``: there is none.
    """
    known = catalog.get(name)
    if known is None or known.checkpoint is None or known.checkpoint.node.count == 1:
        return False
    return known.state in PENDING if commit is None else not may_replace(known.checkpoint, commit, is_chosen=False)


async def changed_commit(
    catalog: Catalog,
    name: str,
    commit: Commit | None,
    crc: str | None,
    *,
    committed_crc: Callable[[str], Awaitable[str | None]],
    until_s: float,
) -> bool:
    """Wait while a commit is pending. Returns whether the commit of the name has changed, or is gone.

    Args:
        catalog: Checkpoints on the volume.
        name: The checkpoint.
        commit: The known commit; ``None``: there was none.
        crc: CRC64NVME of the document of ``commit``.
        committed_crc: Returns the CRC64NVME of the present commit of a name; ``None``: there is none.
        until_s: End of the wait, monotonic seconds.
    """
    now_crc = crc
    while is_pending(catalog, name, commit) and now_crc in (crc, None) and time.monotonic() < until_s:
        await asyncio.sleep(POLL_S)
        now_crc = await committed_crc(name)
    return now_crc != crc
