"""Health of the store, derived from the outcomes of its requests."""

from __future__ import annotations

from typing import Any, Protocol

from sidecar.errors import StoreError


class EventLog(Protocol):
    """Where changes are recorded."""

    def happened(self, name: str, *, level: str = "info", **fields: Any) -> None:
        """Record an event."""
        ...


class Health:
    """Reachability of the store. ``trouble`` is the latest failure's text, or ``None`` once a request has succeeded.

    ``events`` gets ``store_degraded`` when the store becomes unreachable, and ``store_reached_again`` when it recovers.
    """

    def __init__(self, events: EventLog | None = None) -> None:
        self._events = events
        self.trouble: str | None = None

    def failed(self, error: StoreError) -> None:
        """Record a request that failed in the store or on the network."""
        before, self.trouble = self.trouble, str(error)
        if before is None and self._events is not None:
            hint = "training goes on; uploads are tried again for ever"
            self._events.happened("store_degraded", level="error", error=self.trouble, hint=hint)

    def succeeded(self) -> None:
        """Record a request that succeeded."""
        if self.trouble is not None:
            self.trouble = None
            if self._events is not None:
                self._events.happened("store_reached_again")
