"""Health of the store, derived from its answers and from what it has not answered: one view for all requests."""

from __future__ import annotations

import time
from collections.abc import Callable

from sidecar.core.lifecycle.store_state import Evidence
from sidecar.errors import StoreBusy, StoreError, StoreFull, StoreUnavailable

REPORT_S = 60.0
"""Seconds between two lines of the log about the store's trouble."""
LASTS_S = 5.0
"""Seconds after which trouble that began within ``REPORT_S`` of an earlier report is reported, too."""
HINT = "training goes on; uploads are tried again until the store takes them"
_NEW = 0.3
"""Weight of the latest duration in the usual one."""


class Health:
    """Reachability of the store, and the requests that it refuses while it answers others.

    ``happened`` records the beginning of trouble (``store_degraded``), what is pending once a minute
    (``store_still_degraded``), and the end (``store_reached_again``). Trouble that comes within a minute of an earlier report
    is reported only if it lasts: a store that fails now and then does not fill the log.
    """

    def __init__(
        self, happened: Callable[..., object] = lambda _, **__: None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._happened = happened
        self._clock = clock
        self.answers = 0
        """Requests that were answered."""
        self.is_watched = False
        """A ``StoreWatch`` asks a store that is away, so that other requests need not."""
        self.unreachable: str | None = None
        """The latest failure's text; ``None``: a request was answered since."""
        self._ask_failed = False
        self._failed: dict[object, int] = {}
        """Of each failing request: how many others had been answered when it last failed."""
        self._lasting: dict[object, StoreError] = {}
        """Failing requests beside which others are answered, with their latest failures."""
        self._refused_uploads: set[object] = set()
        """Those of them that are uploads, and were refused since an upload last succeeded."""
        self._answered_at_s: float | None = None
        self._asked_at_s: float | None = None
        self._usual_s = 0.0
        self._uploads = 0
        self._still_since_s = 0.0
        self._sent_bytes = 0
        self._began_s = 0.0
        """When the present trouble began."""
        self._reported_s = float("-inf")
        self._is_reported = False
        """The log has the beginning of the present trouble."""
        self._failures = 0
        """Failed requests in the present trouble."""

    @property
    def trouble(self) -> str | None:
        """Text of the latest failure. ``None``: the store answers, and no request fails again and again."""
        latest = next(reversed(self._lasting.values()), None)
        return self.unreachable or (None if latest is None else str(latest))

    @property
    def is_away(self) -> bool:
        """Whether no request can succeed now: the latest one failed, and so did the one that only asks for an answer."""
        return self.unreachable is not None and self._ask_failed

    @property
    def is_full(self) -> bool:
        """Whether the store refuses a request for lack of space: it can be read, and nothing becomes durable."""
        return any(isinstance(error, StoreFull) for error in self._lasting.values())

    def evidence(self, *, sent_bytes: int, is_limited: bool) -> Evidence:
        """Return what is known now.

        Args:
            sent_bytes: All bytes of bodies that were sent so far.
            is_limited: There is a bandwidth limit: that uploads stand still says nothing.
        """
        now_s = self._clock()
        if sent_bytes != self._sent_bytes or not self._uploads or is_limited:
            self._sent_bytes, self._still_since_s = sent_bytes, now_s
        answered_at_s, asked_at_s = self._answered_at_s, self._asked_at_s
        if asked_at_s is not None and answered_at_s is not None:
            asked_at_s = max(asked_at_s, answered_at_s)  # others were answered meanwhile: the store is not late
        return Evidence(
            answered_ago_s=None if answered_at_s is None else now_s - answered_at_s,
            asked_ago_s=None if asked_at_s is None else now_s - asked_at_s,
            usual_s=self._usual_s,
            still_ago_s=now_s - self._still_since_s,
            failure=self.unreachable if self.is_away or not self.is_watched else None,
            is_full=self.is_full,
            refuses_uploads=bool(self._refused_uploads),
        )

    def failed(self, error: StoreError, request: object, *, is_upload: bool = False) -> None:
        """Record that a request has failed in the store or on the network, and is tried again."""
        before = self.trouble
        is_answer = isinstance(error, StoreFull)  # reads succeed beside it, which ends nothing
        if is_answer or self._failed.get(request, self.answers) != self.answers:
            self._lasting[request] = error  # others were answered since its last try: the store is there
            if is_upload:
                self._refused_uploads.add(request)
        else:
            self.unreachable = str(error)
        self._failed[request] = self.answers
        self._failures += 1
        if before is None:
            self._began_s, self._failures = self._clock(), 1
            if self._clock() - self._reported_s >= REPORT_S:
                self._report_beginning()

    def given_up(self, error: StoreError) -> None:
        """Record a request that failed and is not retried: its caller reports the error."""
        self.unreachable = str(error)

    def answered(self) -> None:
        """Record that the store has answered a request."""
        before, self.unreachable = self.trouble, None
        self.answers += 1
        self._answered_at_s = self._clock()
        self._report_end(before)

    def ended(self, request: object) -> None:
        """Record that a request is not tried again: it has succeeded, or nobody wants it any more."""
        before = self.trouble
        self._failed.pop(request, None)
        self._lasting.pop(request, None)
        self._refused_uploads.discard(request)
        self._report_end(before)

    def asking(self) -> None:
        """Record that a small request begins, whose only purpose is its answer."""
        self._asked_at_s = self._clock()

    def asked(self, *, is_answered: bool) -> None:
        """Record that it has ended."""
        if is_answered and self._asked_at_s is not None:
            took_s = self._clock() - self._asked_at_s
            self._usual_s = took_s if not self._usual_s else (1 - _NEW) * self._usual_s + _NEW * took_s
        self._asked_at_s, self._ask_failed = None, not is_answered

    def upload_begins(self) -> None:
        """Record that an upload's request begins."""
        if not self._uploads:
            self._still_since_s = self._clock()
        self._uploads += 1

    def upload_ended(self, *, is_stored: bool) -> None:
        """Record that it has ended. ``is_stored``: the store has taken it."""
        self._uploads -= 1
        self._still_since_s = self._clock()
        if is_stored:
            self._refused_uploads.clear()

    def report(self, **pending: object) -> None:
        """Report trouble that lasts, at most once a minute, with what waits for its end. Called about once a second."""
        if self.trouble is None:
            return
        if not self._is_reported:
            if self._clock() - self._began_s >= LASTS_S:
                self._report_beginning()
            return
        if self._clock() - self._reported_s < REPORT_S:
            return
        self._reported_s = self._clock()
        self._happened(
            "store_still_degraded",
            level="warning",
            error=self.trouble,
            since_s=self._since_s(),
            failures=self._failures,
            **pending,
        )

    def _report_beginning(self) -> None:
        self._reported_s, self._is_reported = self._clock(), True
        self._happened("store_degraded", level="error", error=self.trouble, hint=HINT)

    def _report_end(self, before: str | None) -> None:
        if before is not None and self.trouble is None and self._is_reported:
            self._is_reported = False
            self._happened("store_reached_again", after_s=self._since_s(), failures=self._failures)

    def _since_s(self) -> float:
        return round(self._clock() - self._began_s, 1)


def is_silence(error: BaseException) -> bool:
    """Whether the store could not be reached or has failed, rather than asked for fewer requests or refused this one."""
    return isinstance(error, StoreUnavailable) and not isinstance(error, StoreBusy)
