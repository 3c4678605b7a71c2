"""Throughput to the store: measurements and estimates."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

WINDOW_S = 30.0
SHORT_S, LONG_S = 3.0, 10.0
"""Windows over which sent bytes are counted, in busy seconds."""
DOUBT = 0.1
"""Margin below the slowest and above the fastest measurement, as a share of it."""
TELLING_BYTES = 4 << 20
"""Minimum of confirmed bytes that measure the link's rate: fewer measure the store's latency."""
MEASURED_AFTER_S = 2.0
"""Busy seconds before sent bytes count: connections start slowly, and send buffers take more than the link."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Expected bytes per second, with its bounds."""

    low: float
    expected: float
    high: float

    def samples(self, count: int) -> list[float]:
        """Return ``count`` rates from ``low`` to ``high`` at even distances, at least two. None of them is 0."""
        step = (self.high - self.low) / (count - 1)
        return [max(self.low + step * number, self.high * 1e-9) for number in range(count)]

    def at_most(self, limit: float | None) -> Rate:
        """Return the rate, capped by ``limit``; ``None``: no cap."""
        return self if limit is None else Rate(min(self.low, limit), min(self.expected, limit), min(self.high, limit))


class Throughput:
    """Bytes per second of busy time over the last ``WINDOW_S`` seconds in which anything was sent.

    Time comes in as ``now_s`` (monotonic). Idle time does not count: the rate answers "how fast when sending".
    """

    def __init__(self, *, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._sent: deque[tuple[float, float, int]] = deque()
        self._busy_s: float | None = 0.0  # of what is in _sent; None: not known yet
        self._total_bytes = 0

    def add(self, size_bytes: int, *, began_s: float, now_s: float) -> None:
        """Record ``size_bytes`` confirmed for a request that ran from ``began_s`` to ``now_s``."""
        self._sent.append((began_s, now_s, size_bytes))
        self._total_bytes += size_bytes
        while self._sent and self._sent[0][1] < now_s - self._window_s and len(self._sent) > 1:
            self._total_bytes -= self._sent.popleft()[2]
        self._busy_s = None

    def bytes_per_s(self) -> float | None:
        """Return the rate, or ``None`` before the first measurement."""
        busy_s = self._measured_busy_s()
        return self._total_bytes / busy_s if busy_s > 0 and self._total_bytes > 0 else None

    def telling_bytes_per_s(self) -> float | None:
        """Return the rate, or ``None`` below ``TELLING_BYTES``, which measure the store's latency alone."""
        enough = self._total_bytes >= TELLING_BYTES or self._measured_busy_s() >= MEASURED_AFTER_S
        return self.bytes_per_s() if enough else None

    def _measured_busy_s(self) -> float:
        if self._busy_s is None:
            self._busy_s = _union_s(self._sent)
        return self._busy_s


def _union_s(requests: Iterable[tuple[float, float, int]]) -> float:
    """Return the seconds in which at least one of the requests ran."""
    busy_s, reached_s = 0.0, float("-inf")
    for began_s, ended_s, _ in sorted(requests):
        busy_s += max(0.0, ended_s - max(began_s, reached_s))
        reached_s = max(reached_s, ended_s)
    return busy_s


class RateEstimator:
    """Rate of sent bytes, sampled periodically. It shows a change of the link seconds before a large part is confirmed."""

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None
        self._busy: deque[tuple[float, int]] = deque()

    def sample(self, passed_bytes: int, *, now_s: float, busy: bool) -> None:
        """Record a sample of the byte counter. ``busy``: bytes were ready to be sent since the last sample."""
        if self._last is not None and busy and now_s > self._last[0]:
            self._busy.append((now_s - self._last[0], passed_bytes - self._last[1]))
            while sum(took_s for took_s, _ in self._busy) - self._busy[0][0] > LONG_S:
                self._busy.popleft()
        self._last = (now_s, passed_bytes)

    def bytes_per_s(self, within_s: float) -> float | None:
        """Return the rate of the latest ``within_s`` busy seconds, or ``None`` if there are too few samples."""
        took_s, passed_bytes = 0.0, 0
        for part_s, part_bytes in reversed(self._busy):
            if took_s >= within_s:
                break
            took_s, passed_bytes = took_s + part_s, passed_bytes + part_bytes
        return passed_bytes / took_s if took_s >= MEASURED_AFTER_S else None


def estimated(*, arrived: float | None, sent: RateEstimator, limit: float | None) -> Rate | None:
    """Return the rate to plan with, or ``None`` before any measurement.

    Args:
        arrived: Confirmed bytes per second, from ``Throughput``; ``None``: unknown.
        sent: Rate of sent bytes.
        limit: Bandwidth limit in bytes per second; ``None``: unlimited.
    """
    measured = [rate for rate in (arrived, sent.bytes_per_s(LONG_S), sent.bytes_per_s(SHORT_S)) if rate is not None]
    if not measured:
        return None if limit is None else Rate(limit * (1 - 3 * DOUBT), limit, limit)
    return Rate(min(measured) * (1 - DOUBT), measured[0], max(measured) * (1 + DOUBT)).at_most(limit)
