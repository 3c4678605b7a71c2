"""Whether to go on waiting for a sidecar that does not answer: it may not have started yet, or has ended."""

from __future__ import annotations

from enum import Enum

ENDED_S = 3.0
"""Seconds without a sign of life from which a sidecar that had given one has ended.

Another one, which has waited for the volume until the first ended, gives a sign within that time.
"""


class Wait(Enum):
    """What to do next."""

    GOES_ON = "goes on"
    OVER = "over"
    ENDED = "ended"


def wait_for_start(*, now_s: float, until_s: float, alive_at_s: float | None) -> Wait:
    """Return whether to go on waiting.

    Args:
        now_s: The present time.
        until_s: When the time is over.
        alive_at_s: When the API answered last or the volume's lock was held last; ``None``: neither yet, so the sidecar has not
            started, or it ended before its first sign of life, which nobody can tell apart.
    """
    if alive_at_s is not None and now_s - alive_at_s >= ENDED_S:
        return Wait.ENDED
    return Wait.OVER if now_s >= until_s else Wait.GOES_ON
