"""Committed checkpoints of the store, read for one call."""

from __future__ import annotations

import asyncio

from sidecar.api import models, views
from sidecar.api.problems import Problem
from sidecar.core.commit.resume import newest_first, steps_before
from sidecar.daemon.services import Services
from sidecar.download.downloader import Downloader
from sidecar.errors import UnusableNow
from trainer_hook.contract import ContractError

PATIENCE_S = 20.0
"""Seconds for which a call waits for the store, whose threads belong to the uploads."""
AT_ONCE = 16
"""Commits read at the same time."""


async def stored_checkpoints(
    services: Services, *, only: str | None = None, before_step: int | None = None, limit: int | None = None
) -> list[models.Checkpoint]:
    """Return committed checkpoints, newest first, and those that failed verification as bad.

    Args:
        services: Of this sidecar.
        only: Name of the one that is read; ``None``: all, and ``final``.
        before_step: Only lower steps; ``None``: all.
        limit: Number of the newest that are read; ``None``: all.

    Raises:
        Problem: The store does not answer.
    """
    downloader = services.store_reader.downloader
    if downloader is None or services.health.unreachable is not None:
        trouble = services.health.unreachable or "it was not reached yet"
        raise Problem(503, "Store not reachable", f"{trouble} (where=local lists the volume alone)")
    reading = asyncio.create_task(_read(downloader, only, before_step, limit))
    # Not awaited when cancelled: a request ends when its thread does.
    done, _ = await asyncio.wait({reading}, timeout=PATIENCE_S)
    if not done:
        reading.cancel()
        hint = "where=local lists the volume alone, limit=20 the newest"
        raise Problem(503, "Store not reachable", f"no answer within {PATIENCE_S:.0f} s; {hint}")
    return [views.judged(found, services.quarantine.quarantined) for found in reading.result()]


async def _read(
    downloader: Downloader, only: str | None, before_step: int | None, limit: int | None
) -> list[models.Checkpoint]:
    names = [only] if only else steps_before(newest_first(await downloader.list_folders(), and_final=True), before_step)
    found: list[models.Checkpoint] = []
    while names and (limit is None or len(found) < limit):
        batch, names = names[:AT_ONCE], names[AT_ONCE:]
        found += filter(None, await asyncio.gather(*(stored_checkpoint(downloader, name) for name in batch)))
    return found[:limit]


async def stored_checkpoint(downloader: Downloader, name: str) -> models.Checkpoint | None:
    """Return a committed checkpoint; ``None``: it is not committed, or its commit cannot be used.

    Raises:
        StoreError: The store does not answer.
    """
    try:
        commit = await downloader.commit(name)
    except (ContractError, UnusableNow):
        return None
    return None if commit is None else views.stored_checkpoint(commit[0])
