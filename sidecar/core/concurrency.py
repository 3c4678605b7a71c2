"""How many large requests run at once: as many as make it faster, and fewer when the store asks for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

START = 4
"""Enough for most links; more is tried."""
WINDOW_S = 2.0
"""Shortest time over which a rate is measured."""
GAIN = 1.05
"""A further request must bring this much to be kept."""
REST_S = 30.0
"""How long a limit that could not be raised is left alone."""
SLOWED_REST_S = 10.0
"""How long a limit that the store asked for is left alone."""


@dataclass(frozen=True, slots=True)
class Concurrency:
    """The limit, and what was measured since it was set. Times are monotonic seconds; every change is a new value."""

    limit: int
    most: int
    since_s: float
    sent_bytes: int = 0
    requests: int = 0
    rate_before: float | None = None
    """Bytes per second under the limit before, while a higher one is tried."""
    rest_until_s: float = 0.0

    @staticmethod
    def begin(*, most: int, now_s: float) -> Concurrency:
        """Return the state before anything was sent."""
        return Concurrency(min(START, most), most, now_s)

    def sent(self, size_bytes: int, *, now_s: float) -> Concurrency:
        """A large request of ``size_bytes`` succeeded."""
        counted = replace(self, sent_bytes=self.sent_bytes + size_bytes, requests=self.requests + 1)
        if now_s - self.since_s < WINDOW_S or counted.requests < 2 * self.limit:
            return counted
        return counted._judged(counted.sent_bytes / (now_s - self.since_s), now_s)

    def idle(self, *, now_s: float) -> Concurrency:
        """Nothing was waiting to be sent: what was counted says nothing about the limit."""
        return replace(self, since_s=now_s, sent_bytes=0, requests=0)

    def slowed_down(self, *, now_s: float) -> Concurrency:
        """The store asked for fewer requests (503 SlowDown, 429)."""
        if now_s < self.rest_until_s and self.rate_before is None and now_s - self.since_s < 1.0:
            return self  # the answers to requests of the same moment count once
        return Concurrency(max(1, self.limit // 2), self.most, now_s, rest_until_s=now_s + SLOWED_REST_S)

    def _judged(self, rate: float, now_s: float) -> Concurrency:
        if self.rate_before is not None and rate < self.rate_before * GAIN:
            return Concurrency(max(1, self.limit - 1), self.most, now_s, rest_until_s=now_s + REST_S)
        if now_s < self.rest_until_s or self.limit >= self.most:
            return Concurrency(self.limit, self.most, now_s, rest_until_s=self.rest_until_s)
        return Concurrency(self.limit + 1, self.most, now_s, rate_before=rate)
