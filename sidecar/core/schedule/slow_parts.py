"""Hedging of slow parts: which request is retried in parallel when nothing else is left to send.

After packet loss, a connection starts again at a low rate. The last part of a checkpoint is as slow as its connection.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

SEEN_S = 0.3
"""Minimum time over which a request's rate is measured, in seconds."""
SEEN_BLOCKS = 4
"""The time of measurement also covers this many blocks at the request's share of the link: progress comes in whole blocks."""
BEGIN_S = 0.2
"""Seconds that a new connection needs to reach full rate."""
AT_LEAST = 1.5
"""Factor by which a hedge has to be faster than waiting."""
IDLE = 0.5
"""The link has room for a hedge if at most this share of it is used."""


@dataclass(slots=True)
class RequestProgress:
    """Recent progress of one request. Times are monotonic seconds."""

    bytes_per_s: float | None = None
    """Measured rate; ``None`` before enough time."""
    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def record(self, left_bytes: int, *, now_s: float, over_s: float) -> None:
        """Record the bytes not sent yet; the rate is measured over ``over_s`` seconds."""
        self._seen.append((now_s, left_bytes))
        while len(self._seen) > 2 and now_s - self._seen[1][0] >= over_s:
            self._seen.popleft()
        took_s = now_s - self._seen[0][0]
        self.bytes_per_s = max(0.0, (self._seen[0][1] - left_bytes) / took_s) if took_s >= over_s else None


def seen_over_s(*, requests: int, block_bytes: int, link_bytes_per_s: float) -> float:
    """Return the seconds over which the rates of this many concurrent requests are measured."""
    return max(SEEN_S, SEEN_BLOCKS * block_bytes * requests / link_bytes_per_s)


def is_worth_hedging(
    *,
    left_bytes: int,
    bytes_per_s: float | None,
    size_bytes: int,
    others_left_bytes: int,
    used_bytes_per_s: float,
    link_bytes_per_s: float,
) -> bool:
    """Whether to hedge a request: the link has room, and sending all of it again ends well before the original does.

    Args:
        left_bytes: Its bytes not sent yet; 0: only the answer is missing.
        bytes_per_s: Its rate; ``None``: unknown.
        size_bytes: Its size.
        others_left_bytes: Bytes not sent yet of other requests, which share the link.
        used_bytes_per_s: Rate of all requests together.
        link_bytes_per_s: Capacity of the link.
    """
    if bytes_per_s is None or used_bytes_per_s > IDLE * link_bytes_per_s:
        return False
    again_s = BEGIN_S + (size_bytes + others_left_bytes) / link_bytes_per_s
    return left_bytes > AT_LEAST * again_s * bytes_per_s
