"""Health of the store, derived from the outcomes of its requests."""

from __future__ import annotations

from collections.abc import Callable

from sidecar.errors import StoreError, StoreFull


class Health:
    """Reachability of the store, and the requests that it refuses while it answers others.

    ``happened`` records ``store_degraded`` when trouble begins, and ``store_reached_again`` when it has ended.
    """

    def __init__(self, happened: Callable[..., object] = lambda _, **__: None) -> None:
        self._happened = happened
        self.answers = 0
        """Requests that have succeeded."""
        self._failed: dict[object, int] = {}
        """Of each failing request: how many others had succeeded when it last failed."""
        self._lasting: dict[object, StoreError] = {}
        """Failing requests beside which others succeed, with their latest failures."""
        self.unreachable: str | None = None
        """The latest failure's text; ``None``: a request has succeeded since."""

    @property
    def trouble(self) -> str | None:
        """Text of the latest failure. ``None``: the store answers, and no request fails again and again."""
        latest = next(reversed(self._lasting.values()), None)
        return self.unreachable or (None if latest is None else str(latest))

    @property
    def is_full(self) -> bool:
        """Whether the store refuses a request for lack of space: it can be read, and nothing becomes durable."""
        return any(isinstance(error, StoreFull) for error in self._lasting.values())

    def failed(self, error: StoreError, request: object) -> None:
        """Record that a request has failed in the store or on the network, and is tried again."""
        before = self.trouble
        is_answered = isinstance(error, StoreFull)  # reads succeed beside it, which ends nothing
        if is_answered or self._failed.get(request, self.answers) != self.answers:
            self._lasting[request] = error  # others were answered since its last try: the store is there
        else:
            self.unreachable = str(error)
        self._failed[request] = self.answers
        if before is None:
            hint = "training goes on; uploads are tried again for ever"
            self._happened("store_degraded", level="error", error=str(error), hint=hint)

    def given_up(self, error: StoreError) -> None:
        """Record a request that failed and is not retried: its caller reports the error."""
        self.unreachable = str(error)

    def succeeded(self) -> None:
        """Record a request that succeeded."""
        before, self.unreachable = self.trouble, None
        self.answers += 1
        self._tell_end(before)

    def ended(self, request: object) -> None:
        """Record that a request is not tried again: it has succeeded, or nobody wants it any more."""
        before = self.trouble
        self._failed.pop(request, None)
        self._lasting.pop(request, None)
        self._tell_end(before)

    def _tell_end(self, before: str | None) -> None:
        if before is not None and self.trouble is None:
            self._happened("store_reached_again")
