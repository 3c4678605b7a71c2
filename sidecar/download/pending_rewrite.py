"""A committed step whose rewrite by a later attempt is under way: this node's part of it is on the volume."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from sidecar.catalog.catalog import Catalog
from sidecar.core.commit.resume import may_replace
from sidecar.core.format.manifest import Commit

PATIENCE_S = 15.0
"""Longest wait of a request for the job to commit its parts of the later attempt, in seconds."""
POLL_S = 0.5


def is_pending(catalog: Catalog, commit: Commit) -> bool:
    """Whether the volume holds this node's part of another attempt, which the job may be about to commit instead."""
    known = catalog.get(commit.name)
    local = known.checkpoint if known else None
    return local is not None and local.node.count > 1 and not may_replace(local, commit, is_chosen=False)


async def changed_commit(
    catalog: Catalog, commit: Commit, crc: str, *, committed_crc: Callable[[str], Awaitable[str | None]], until_s: float
) -> bool:
    """Wait while a rewrite is pending. Returns whether something else than ``commit`` is committed now, or nothing.

    ``crc``: CRC64NVME of the document of ``commit``. ``committed_crc``: returns that of the present commit of a name; ``None``:
    there is none. ``until_s``: monotonic seconds.
    """
    now_crc: str | None = crc
    while is_pending(catalog, commit) and now_crc in (crc, None) and time.monotonic() < until_s:
        await asyncio.sleep(POLL_S)
        now_crc = await committed_crc(commit.name)
    return now_crc != crc
