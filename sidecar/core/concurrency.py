"""How many large requests run at once: as many as make it faster, and fewer when the store asks for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

FEWEST_AT_START, MOST_AT_START = 2, 4
"""Enough for most links; more is tried."""
LONG_S = 0.01
"""A store that is so far away leaves the link idle while one of two connections begins, or waits for its answer."""
WINDOW_S = 1.0
"""Shortest time over which a rate is measured."""
GAIN = 0.3
"""Share of what a higher limit could bring at best that it must bring to be kept."""
REST_S = 30.0
"""How long a limit that could not be raised is left alone."""
SLOWED_REST_S = 10.0
"""How long a limit that the store asked for is left alone."""
SAME_MOMENT_S = 1.0
"""Refusals this close together are the answer to one limit."""
SMALL_S = 0.00025
"""What a small request costs this process: while one is away, so many others are made per round trip."""
EACH_SMALL = 4
"""Small requests that a thread has under way at a store that is near: it never sleeps until an answer wakes it."""
NEAR = 2 * EACH_SMALL
"""Where a round trip has room for more, threads may as well sleep, and none waits for the answer to another's request."""


@dataclass(frozen=True, slots=True)
class SmallRequests:
    """How small requests are sent: in how many threads, and how many each of them has under way."""

    threads: int
    at_once: int


def is_near(round_trip_s: float | None) -> bool:
    """Whether a store answers so soon that a round trip has room for few small requests."""
    return round_trip_s is not None and _room(round_trip_s) <= NEAR


def small_requests(*, most: int, round_trip_s: float | None) -> SmallRequests:
    """Return how small requests are sent: more than a round trip has room for only compete for the interpreter.

    Args:
        most: Requests at once.
        round_trip_s: To the store; ``None``: it is not known.
    """
    room = most if round_trip_s is None else _room(round_trip_s)
    if not is_near(round_trip_s):
        return SmallRequests(min(most, room), 1)
    each = min(most, EACH_SMALL)
    return SmallRequests(max(1, min(most // each, math.ceil(room / each))), each)


def _room(round_trip_s: float) -> int:
    return max(1, math.ceil(round_trip_s / SMALL_S))


@dataclass(frozen=True, slots=True)
class Concurrency:
    """The limit, and what was measured since it was set. Times are monotonic seconds; every change is a new value."""

    limit: int
    most: int
    since_s: float
    sent_bytes: int = 0
    requests: int = 0
    before: tuple[int, float] | None = None
    """The limit before and its bytes per second, while a higher one is tried."""
    rest_until_s: float = 0.0
    slowed_s: float = float("-inf")
    is_cold: bool = True
    """Connections are new: how fast they begin says nothing about the limit."""

    @staticmethod
    def begin(*, most: int, cores: int, now_s: float, round_trip_s: float | None = None) -> Concurrency:
        """Return the state before anything was sent: more requests than cores only compete, unless the link is long."""
        fewest = FEWEST_AT_START + (round_trip_s is not None and round_trip_s >= LONG_S)
        return Concurrency(min(most, max(fewest, min(MOST_AT_START, cores))), most, now_s)

    def sent(self, size_bytes: int, *, now_s: float) -> Concurrency:
        """A request of ``size_bytes`` succeeded."""
        counted = replace(self, sent_bytes=self.sent_bytes + size_bytes, requests=self.requests + 1)
        if now_s - self.since_s < WINDOW_S or counted.requests < 2 * self.limit:
            return counted
        if counted.is_cold:
            return replace(counted.idle(now_s=now_s), is_cold=False)
        return counted._judged(counted.sent_bytes / (now_s - self.since_s), now_s)

    def idle(self, *, now_s: float) -> Concurrency:
        """Nothing was waiting to be sent: what was counted says nothing about the limit."""
        return replace(self, since_s=now_s, sent_bytes=0, requests=0)

    def slowed_down(self, *, now_s: float) -> Concurrency:
        """The store asked for fewer requests (SlowDown, 429): half of them."""
        if now_s - self.slowed_s < SAME_MOMENT_S:
            return self
        rest_until_s = now_s + SLOWED_REST_S
        return Concurrency(max(1, self.limit // 2), self.most, now_s, rest_until_s=rest_until_s, slowed_s=now_s)

    def _judged(self, rate: float, now_s: float) -> Concurrency:
        fresh = replace(self.idle(now_s=now_s), before=None)
        if self.before is not None and not self._paid_off(rate, *self.before):
            return replace(fresh, limit=self.before[0], rest_until_s=now_s + REST_S)
        if now_s < self.rest_until_s or self.limit >= self.most:
            return fresh
        return replace(fresh, limit=min(self.most, self.limit + max(1, self.limit // 2)), before=(self.limit, rate))

    def _paid_off(self, rate: float, limit_before: int, rate_before: float) -> bool:
        return rate >= rate_before * (1 + GAIN * (self.limit / limit_before - 1))
