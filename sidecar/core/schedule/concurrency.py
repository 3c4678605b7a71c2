"""Concurrency of requests: adapts to the measured throughput, and halves on SlowDown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

FEWEST_AT_START, MOST_AT_START = 2, 4
"""Bounds of the initial limit, which suffices for most links; higher limits are tried later."""
LONG_S = 0.01
"""Round trip in seconds from which two connections leave the link idle while one starts, or waits for its answer."""
WINDOW_S = 1.0
"""Minimum time over which a rate is measured, in seconds."""
GAIN = 0.3
"""A higher limit is kept if it brings at least this share of the best possible gain."""
REST_S = 30.0
"""Seconds until the limit is raised again after a raise that did not pay off."""
SLOWED_REST_S = 10.0
"""Seconds until the limit is raised again after the store asked for fewer requests."""
SAME_MOMENT_S = 1.0
"""SlowDown answers within this time, in seconds, count as one."""
SMALL_S = 0.00025
"""CPU time of a small request in this process, in seconds; a round trip has room for as many requests as it fits."""
EACH_SMALL = 4
"""Small requests in flight per thread for a near store: the thread never sleeps until an answer wakes it."""
NEAR = 2 * EACH_SMALL
"""If a round trip has room for more small requests than this, each thread has one in flight, and sleeps until its answer."""
ANSWERED_WITHIN_S = 2.0
"""Seconds of the measured throughput that may wait for answers. What waits longer is in the buffer of a proxy, where a newer
checkpoint cannot overtake it."""
UNANSWERED_BYTES = 64 << 20
"""The same before any measurement: the answers of a distant store are late, too."""


@dataclass(frozen=True, slots=True)
class SmallRequests:
    """Concurrency of small requests: number of threads, and of requests in flight per thread."""

    threads: int
    at_once: int


def is_near(round_trip_s: float | None) -> bool:
    """Whether the store is near: a round trip has room for few small requests. ``round_trip_s`` ``None``: unknown."""
    return round_trip_s is not None and _room(round_trip_s) <= NEAR


def small_requests(*, most: int, round_trip_s: float | None) -> SmallRequests:
    """Return the concurrency of small requests. More than a round trip has room for would only compete for the interpreter.

    ``most``: maximum concurrent requests. ``round_trip_s``: ``None``: unknown.
    """
    room = most if round_trip_s is None else _room(round_trip_s)
    if not is_near(round_trip_s):
        return SmallRequests(min(most, room), 1)
    each = min(most, EACH_SMALL)
    return SmallRequests(max(1, min(most // each, math.ceil(room / each))), each)


def awaits_answers(sent_bytes: Sequence[int], *, limit: int, bytes_per_s: float | None) -> bool:
    """Whether further large bodies wait until those that were sent are answered.

    Args:
        sent_bytes: Sizes of the bodies that were sent as a whole and are not answered.
        limit: The limit of concurrent requests: as many may wait for answers at any throughput.
        bytes_per_s: Measured throughput; ``None``: unknown.
    """
    enough_bytes = UNANSWERED_BYTES if bytes_per_s is None else ANSWERED_WITHIN_S * bytes_per_s
    return len(sent_bytes) >= limit and sum(sent_bytes) >= enough_bytes


def _room(round_trip_s: float) -> int:
    return math.ceil(round_trip_s / SMALL_S)


@dataclass(frozen=True, slots=True)
class Concurrency:
    """The limit of concurrent requests, and the measurements since it was set. Immutable; times are monotonic seconds."""

    limit: int
    most: int
    since_s: float
    sent_bytes: int = 0
    requests: int = 0
    before: tuple[int, float] | None = None
    """The previous limit and its bytes per second, while a higher one is tried; else ``None``."""
    rest_until_s: float = 0.0
    slowed_s: float = float("-inf")
    is_cold: bool = True
    """Connections are new: their initial rate says nothing about the limit."""

    @staticmethod
    def begin(*, most: int, cores: int, now_s: float, round_trip_s: float | None = None) -> Concurrency:
        """Return the initial state: as many requests as cores, within bounds; one more at least for a long round trip."""
        fewest = FEWEST_AT_START + (round_trip_s is not None and round_trip_s >= LONG_S)
        return Concurrency(min(most, max(fewest, min(MOST_AT_START, cores))), most, now_s)

    def sent(self, size_bytes: int, *, now_s: float) -> Concurrency:
        """Return the state after a successful request of ``size_bytes``."""
        counted = replace(self, sent_bytes=self.sent_bytes + size_bytes, requests=self.requests + 1)
        if now_s - self.since_s < WINDOW_S or counted.requests < 2 * self.limit:
            return counted
        if counted.is_cold:
            return replace(counted.idle(now_s=now_s), is_cold=False)
        return counted._after_window(counted.sent_bytes / (now_s - self.since_s), now_s)

    def idle(self, *, now_s: float) -> Concurrency:
        """Return the state after an idle time, without the measurement in progress."""
        return replace(self, since_s=now_s, sent_bytes=0, requests=0)

    def slowed_down(self, *, now_s: float) -> Concurrency:
        """Return the state after a SlowDown or 429: half the limit."""
        if now_s - self.slowed_s < SAME_MOMENT_S:
            return self
        rest_until_s = now_s + SLOWED_REST_S
        return Concurrency(max(1, self.limit // 2), self.most, now_s, rest_until_s=rest_until_s, slowed_s=now_s)

    def _after_window(self, rate: float, now_s: float) -> Concurrency:
        fresh = replace(self.idle(now_s=now_s), before=None)
        if self.before is not None and not self._paid_off(rate, *self.before):
            return replace(fresh, limit=self.before[0], rest_until_s=now_s + REST_S)
        if now_s < self.rest_until_s or self.limit >= self.most:
            return fresh
        return replace(fresh, limit=min(self.most, self.limit + max(1, self.limit // 2)), before=(self.limit, rate))

    def _paid_off(self, rate: float, limit_before: int, rate_before: float) -> bool:
        return rate >= rate_before * (1 + GAIN * (self.limit / limit_before - 1))
