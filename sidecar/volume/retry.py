"""Retries of work on the volume after an error that may pass."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

import structlog

from sidecar.core.format.obstacles import retry_in_s
from sidecar.tasks import within

log = structlog.get_logger()

P = ParamSpec("P")
T = TypeVar("T")


async def retried(work: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do some work, which must be repeatable, and again while the volume fails in a way that may pass.

    Raises:
        OSError: The last error of the volume.
    """
    return await retried_until(asyncio.Event(), work, *args, **kwargs)


async def retried_until(end: asyncio.Event, work: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do as ``retried``; once ``end`` is set, the work is tried once more, at once."""
    failed = 0
    while True:
        is_last = end.is_set()
        try:
            return await work(*args, **kwargs)
        except OSError as error:
            failed += 1
            wait_s = retry_in_s(error.errno, failed)
            if wait_s is None or is_last:
                raise
            where = str(error.filename) if error.filename else None
            name = errno.errorcode.get(error.errno or 0)
            log.warning("volume_failed", path=where, error=error.strerror, errno=name, retry_in_s=wait_s)
        await within(wait_s, end.wait())
