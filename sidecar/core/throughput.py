"""The rate at which bytes arrive in the store, from what was measured lately."""

from __future__ import annotations

from collections import deque

WINDOW_S = 30.0


class Throughput:
    """Bytes per second of busy time over the last ``WINDOW_S`` seconds in which anything was sent.

    Time comes in as ``now_s`` (monotonic). Idle time does not count: the rate answers "how fast when sending".
    """

    def __init__(self, *, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._sent: deque[tuple[float, float, int]] = deque()

    def add(self, size_bytes: int, *, began_s: float, now_s: float) -> None:
        """Record that ``size_bytes`` arrived by a request that ran from ``began_s`` to ``now_s``."""
        self._sent.append((began_s, now_s, size_bytes))
        while self._sent and self._sent[0][1] < now_s - self._window_s and len(self._sent) > 1:
            self._sent.popleft()

    def bytes_per_s(self) -> float | None:
        """Return the rate, or ``None`` before anything was measured."""
        busy_s, reached_s = 0.0, float("-inf")
        for began_s, ended_s, _ in sorted(self._sent):
            busy_s += max(0.0, ended_s - max(began_s, reached_s))
            reached_s = max(reached_s, ended_s)
        total = sum(size for _, _, size in self._sent)
        return total / busy_s if busy_s > 0 and total > 0 else None
