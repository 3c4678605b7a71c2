"""A histogram of durations."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts durations by upper bounds in seconds. A duration on a bound counts below it, as Prometheus has it."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        """``bounds_s``: ascending upper bounds."""
        self._bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(self._bounds_s) + 1)
        self.sum_s = 0.0

    def observe(self, duration_s: float) -> None:
        """Count a duration; less than nothing, by a clock that was set back, counts as nothing."""
        duration_s = max(0.0, duration_s)
        self._counts[bisect_left(self._bounds_s, duration_s)] += 1
        self.sum_s += duration_s

    def buckets(self) -> list[tuple[float, int]]:
        """Return each upper bound with the number of durations up to it; the last bound is infinite."""
        found, total = [], 0
        for bound_s, count in zip((*self._bounds_s, float("inf")), self._counts, strict=True):
            total += count
            found.append((bound_s, total))
        return found
