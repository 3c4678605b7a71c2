"""Which request is worth a second try beside it, when nothing else is left that could use the link.

A connection that lost much on the way begins again from almost nothing, and the last part of a checkpoint is as slow as the
connection it happened to get.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

SEEN_S = 0.3
"""Over so much time, at least, the rate of a request is measured."""
SEEN_BLOCKS = 4
"""And over so much time that it would have sent so many blocks by its share of the link: it moves on by whole ones."""
BEGIN_S = 0.2
"""What a request needs to become fast."""
AT_LEAST = 1.5
"""So many times sooner the second try has to end."""
IDLE = 0.5
"""The link has room if no more than this share of it is used."""


@dataclass(slots=True)
class Course:
    """How the bytes of one request left lately. Times are monotonic seconds."""

    bytes_per_s: float | None = None
    """``None`` before it was seen long enough."""
    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    def saw(self, left_bytes: int, *, now_s: float, over_s: float) -> None:
        """Take note of how many bytes have not left; the rate is measured over ``over_s``."""
        self._seen.append((now_s, left_bytes))
        while len(self._seen) > 2 and now_s - self._seen[1][0] >= over_s:
            self._seen.popleft()
        took_s = now_s - self._seen[0][0]
        self.bytes_per_s = max(0.0, (self._seen[0][1] - left_bytes) / took_s) if took_s >= over_s else None


def seen_over_s(*, requests: int, block_bytes: int, link_bytes_per_s: float) -> float:
    """Return over how much time the rates of so many requests are measured."""
    return max(SEEN_S, SEEN_BLOCKS * block_bytes * requests / link_bytes_per_s)


def is_worth_a_second_try(
    *,
    left_bytes: int,
    bytes_per_s: float | None,
    size_bytes: int,
    others_left_bytes: int,
    used_bytes_per_s: float,
    link_bytes_per_s: float,
) -> bool:
    """Whether the link has room, and a request that is sent again as a whole ends well before it does on its own.

    Args:
        left_bytes: What has not left of it; if nothing, only the answer is missing.
        bytes_per_s: Its rate; ``None``: not known.
        size_bytes: All of it.
        others_left_bytes: What has not left of other requests, which share the link.
        used_bytes_per_s: What all requests together use of the link.
        link_bytes_per_s: What the link carries.
    """
    if bytes_per_s is None or left_bytes <= 0 or used_bytes_per_s > IDLE * link_bytes_per_s:
        return False
    again_s = BEGIN_S + (size_bytes + others_left_bytes) / link_bytes_per_s
    return left_bytes > AT_LEAST * again_s * bytes_per_s
