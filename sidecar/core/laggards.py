"""Which request is worth a second try beside it, when nothing else is left that could use the link.

A connection that lost much on the way begins again from almost nothing, and the last part of a checkpoint is as slow as the
connection it happened to get.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

SEEN_S = 0.3
"""Over so much time the rate of a request is measured; one that began later has none."""
BEGIN_S = 0.2
"""What a request needs to become fast."""
AT_LEAST = 1.5
"""So many times sooner the second try has to end."""


@dataclass(slots=True)
class Course:
    """How the bytes of one request left lately. Times are monotonic seconds."""

    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def saw(self, left_bytes: int, *, now_s: float) -> None:
        """Take note of how many bytes have not left."""
        self._seen.append((now_s, left_bytes))
        while len(self._seen) > 2 and now_s - self._seen[1][0] >= SEEN_S:
            self._seen.popleft()

    def bytes_per_s(self) -> float | None:
        """Return the rate, or ``None`` before it was seen long enough."""
        (first_s, before), (last_s, after) = self._seen[0], self._seen[-1]
        return max(0.0, (before - after) / (last_s - first_s)) if last_s - first_s >= SEEN_S else None


def is_worth_a_second_try(
    *, left_bytes: int, bytes_per_s: float | None, size_bytes: int, others_left_bytes: int, link_bytes_per_s: float
) -> bool:
    """Whether a request that is sent again as a whole ends well before it does on its own.

    Args:
        left_bytes: What has not left of it; if nothing, only the answer is missing.
        bytes_per_s: Its rate; ``None``: not known.
        size_bytes: All of it.
        others_left_bytes: What has not left of other requests, which share the link.
        link_bytes_per_s: What the link carries.
    """
    if bytes_per_s is None or left_bytes <= 0 or link_bytes_per_s <= 0:
        return False
    again_s = BEGIN_S + (size_bytes + others_left_bytes) / link_bytes_per_s
    return left_bytes > AT_LEAST * again_s * bytes_per_s
