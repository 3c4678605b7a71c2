"""Health of the store, derived from the outcomes of its requests."""

from __future__ import annotations

from collections.abc import Callable

from sidecar.errors import StoreError


class Health:
    """Reachability of the store. ``trouble`` is the latest failure's text, or ``None`` once a request has succeeded.

    ``happened`` records ``store_degraded`` when the store becomes unreachable, and ``store_reached_again`` when it recovers.
    """

    def __init__(self, happened: Callable[..., object] = lambda _, **__: None) -> None:
        self._happened = happened
        self.trouble: str | None = None

    def failed(self, error: StoreError) -> None:
        """Record a request that failed in the store or on the network."""
        before, self.trouble = self.trouble, str(error)
        if before is None:
            hint = "training goes on; uploads are tried again for ever"
            self._happened("store_degraded", level="error", error=self.trouble, hint=hint)

    def given_up(self, error: StoreError) -> None:
        """Record a request that failed and is not retried: its caller reports the error."""
        self.trouble = str(error)

    def succeeded(self) -> None:
        """Record a request that succeeded."""
        if self.trouble is not None:
            self.trouble = None
            self._happened("store_reached_again")
