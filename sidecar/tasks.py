"""Tasks of the event loop: run together, within a time, or started again after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NoReturn

import structlog

log = structlog.get_logger()

RESTART_AFTER_S = 1.0
"""Seconds from the failure of a task to its next start."""


async def run_forever(name: str, service: Callable[[], Coroutine[Any, Any, None]]) -> NoReturn:
    """Run a service until cancelled. After an exception it is restarted, so that a bug in one service does not end uploads."""
    while True:
        try:
            await service()
        except Exception:
            log.exception("service_failed", service=name, again_in_s=RESTART_AFTER_S)
        await asyncio.sleep(RESTART_AFTER_S)


async def run_together(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines as tasks until one fails or the caller is cancelled; then all are cancelled.

    Raises:
        ExceptionGroup: Exceptions of the failed coroutines.
    """
    async with asyncio.TaskGroup() as group:
        for coroutine in coroutines:
            group.create_task(coroutine)


async def within(seconds: float | None, waiting: Coroutine[Any, Any, object]) -> bool:
    """Return whether ``waiting`` ended within some seconds; otherwise it is cancelled. ``None``: no limit."""
    try:
        async with asyncio.timeout(seconds):
            await waiting
    except TimeoutError:
        return False
    return True


def first_error(group: BaseException) -> BaseException:
    """Return the first exception inside nested groups."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group
