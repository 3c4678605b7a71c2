"""Health of the store, derived from the outcomes of its requests."""

from __future__ import annotations

from collections.abc import Callable

from sidecar.errors import StoreError


class Health:
    """Reachability of the store. ``trouble`` is the latest failure's text, or ``None`` once a request has succeeded.

    ``on_change`` is called with ``trouble`` when the store becomes unreachable and when it recovers.
    """

    def __init__(self, on_change: Callable[[str | None], None] = lambda _: None) -> None:
        self._on_change = on_change
        self.trouble: str | None = None

    def failed(self, error: StoreError) -> None:
        """Record a request that failed in the store or on the network."""
        before, self.trouble = self.trouble, str(error)
        if before is None:
            self._on_change(self.trouble)

    def succeeded(self) -> None:
        """Record a request that succeeded."""
        if self.trouble is not None:
            self.trouble = None
            self._on_change(None)
