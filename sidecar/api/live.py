"""The overview as a live stream. It is computed once for all viewers, and not at all while there is none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import structlog

from sidecar.api import models
from sidecar.api.overview import OverviewService
from sidecar.daemon.services import Services

log = structlog.get_logger()

TICK_S = 1.0
"""Interval in seconds of overviews without an event."""
LEAST_S = 0.5
"""Minimum interval of overviews, in seconds."""
HEARTBEAT_S = 5.0
"""Seconds after which an unchanged overview is sent again: a viewer takes silence for a lost connection."""
_CHANGES_ALWAYS: dict[str, bool | set[str]] = {"at": True, "at_risk": {"seconds_at_risk"}, "termination": {"deadline_in_s"}}
"""Fields that the viewer counts on by itself."""


class Live:
    """One stream for all viewers. A viewer that reads slowly misses versions, and none is kept for it."""

    def __init__(self, services: Services, overviews: OverviewService) -> None:
        self._services = services
        self._overviews = overviews
        self._viewers = 0
        self._task: asyncio.Task[None] | None = None
        self._message = ""
        self._version = 0
        self._compared = ""
        self._sent_s = float("-inf")
        self._news = asyncio.Event()

    async def stream(self) -> AsyncIterator[str]:
        """Yield server-sent events until the sidecar ends."""
        self._viewers += 1
        if self._task is None or self._task.done():
            self._compared = ""
            self._task = asyncio.create_task(self._run())
        seen, state = -1, self._services.state
        try:
            yield "retry: 2000\n\n"
            while not state.ended.is_set() and not self._task.done():
                if self._version != seen and self._message:
                    seen = self._version
                    yield self._message
                else:
                    await state.unless_ended(self._news.wait())
            if state.ended.is_set():
                yield self._encoded(self._overviews.overview())
                yield "event: ended\ndata: {}\n\n"
        finally:
            self._viewers -= 1
            if self._viewers == 0:
                self._task.cancel()
                self._task = None
                self._message = ""
                self._overviews.earlier.stop()

    async def _run(self) -> None:
        services, state = self._services, self._services.state
        try:
            while not state.ended.is_set():
                self._overviews.earlier.refresh()
                self._look()
                began_s = time.monotonic()
                await state.unless_ended(services.events.changed(timeout_s=TICK_S))
                if (early_s := LEAST_S - (time.monotonic() - began_s)) > 0 and not state.ended.is_set():
                    await asyncio.sleep(early_s)
        except Exception as error:
            log.error("live_page_failed", error=f"{type(error).__name__}: {error}")
        finally:
            self._wake()

    def _look(self) -> None:
        overview = self._overviews.overview()
        compared = overview.model_dump_json(exclude=_CHANGES_ALWAYS)
        if compared == self._compared and time.monotonic() - self._sent_s < HEARTBEAT_S:
            return
        self._compared, self._sent_s = compared, time.monotonic()
        self._message = self._encoded(overview)
        self._version += 1
        self._wake()

    def _encoded(self, overview: models.Overview) -> str:
        return f"event: overview\ndata: {overview.model_dump_json()}\n\n"

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
