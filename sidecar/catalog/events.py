"""Numbered events: one log line each, and a live stream for ``GET /v1/events``."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import structlog

from sidecar.tasks import within

log = structlog.get_logger()

KEPT = 500
"""Number of latest events kept for clients that reconnect."""
HEARTBEAT_S = 15.0
"""Seconds without an event after which a stream has a heartbeat."""


@dataclass(frozen=True, slots=True)
class Event:
    """A past fact. ``number`` counts from 1 in each sidecar process."""

    number: int
    name: str
    fields: dict[str, Any]


def rounded(seconds: float | None) -> float | None:
    """Return seconds as events show them, to the millisecond; ``None`` stays."""
    return None if seconds is None else round(seconds, 3)


class Events:
    """Keeps the latest events and wakes their waiters. Used from the event loop alone."""

    def __init__(self) -> None:
        self._kept: deque[Event] = deque(maxlen=KEPT)
        self.newest = 0
        """Number of the latest event, 0 before the first."""
        self._news = asyncio.Event()
        self._observers: list[Callable[[str, dict[str, Any]], object]] = []

    def observe(self, happened: Callable[[str, dict[str, Any]], object]) -> None:
        """Call ``happened`` with the name and the fields of each event from now on."""
        self._observers.append(happened)

    def happened(self, name: str, *, level: str = "info", quiet: bool = False, **fields: Any) -> None:
        """Record an event. ``quiet``: do not log it (progress)."""
        if not quiet:
            getattr(log, level)(name, **fields)
        self.newest += 1
        self._kept.append(Event(self.newest, name, fields))
        for happened in self._observers:
            happened(name, fields)
        self._news.set()
        self._news = asyncio.Event()

    def after(self, number: int) -> list[Event]:
        """Return the kept events with a higher number."""
        return [event for event in self._kept if event.number > number]

    async def changed(self, *, timeout_s: float) -> bool:
        """Wait for the next event; false when ``timeout_s`` passed first."""
        return await within(timeout_s, self._news.wait())

    async def stream(self, after: int | None = None) -> AsyncIterator[Event | None]:
        """Yield events from now on, or those after a number; ``None`` is a heartbeat."""
        seen = self.newest if after is None or after > self.newest else after
        while True:
            for event in self.after(seen):
                seen = event.number
                yield event
            if not self.after(seen) and not await self.changed(timeout_s=HEARTBEAT_S):
                yield None
