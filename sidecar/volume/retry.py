"""Retries of work on the volume after an error that may pass."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

import structlog

from sidecar.core.format.obstacles import retry_in_s

log = structlog.get_logger()

P = ParamSpec("P")
T = TypeVar("T")


async def retried(work: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do some work, which must be repeatable, and again while the volume fails in a way that may pass.

    Raises:
        OSError: The last error of the volume.
    """
    failed = 0
    while True:
        try:
            return await work(*args, **kwargs)
        except OSError as error:
            failed += 1
            wait_s = retry_in_s(error.errno, failed)
            if wait_s is None:
                raise
            where = str(error.filename) if error.filename else None
            name = errno.errorcode.get(error.errno or 0)
            log.warning("volume_failed", path=where, error=error.strerror, errno=name, retry_in_s=wait_s)
        await asyncio.sleep(wait_s)
