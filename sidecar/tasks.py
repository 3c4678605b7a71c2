"""Tasks of the event loop: run together, within a time, or started again after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

import structlog

log = structlog.get_logger()

T = TypeVar("T")
TICK_S = 1.0
"""Most seconds that a process which was stopped loses of ``in_running_time``."""
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


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Yield an ``asyncio.TaskGroup`` that raises the first error of its tasks itself.

    Callers need no ``except*``: up to Python 3.11.3 what is raised inside of it reaches nobody but as a group (gh-103590).
    """
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        error = _first_error(errors)
    else:
        return
    raise error  # out here it keeps the cause and the context that it had


async def run_together(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines as tasks until one fails or the caller is cancelled; then all are cancelled.

    Raises:
        Exception: The first one of a coroutine.
    """
    async with task_group() as group:
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


async def in_running_time(seconds: float | None, waiting: Coroutine[Any, Any, T]) -> T:
    """Return what ``waiting`` returns within some seconds; otherwise it is cancelled. ``None``: no limit.

    Time for which this process was stopped, or its machine suspended, does not count: it had no chance to take the answer.

    Raises:
        TimeoutError: The time is over.
    """
    task, left_s = asyncio.ensure_future(waiting), seconds
    try:
        while not task.done() and (left_s is None or left_s > 0):
            tick_s = None if left_s is None else min(TICK_S, left_s)
            await asyncio.wait({task}, timeout=tick_s)
            left_s = None if left_s is None or tick_s is None else left_s - tick_s
        if task.done():
            return task.result()
        raise TimeoutError
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


def _first_error(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
