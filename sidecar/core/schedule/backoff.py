"""Backoff between retries."""

from __future__ import annotations

FIRST_S = 0.5
CAP_S = 30.0


def delay_s(failures: int, *, random_0_1: float, first_s: float = FIRST_S, cap_s: float = CAP_S) -> float:
    """Return the seconds to wait after ``failures`` consecutive failures (from 1).

    The wait doubles up to ``cap_s``; jitter of up to half of it is subtracted, so that many nodes do not retry together.
    """
    full = min(cap_s, first_s * 2.0 ** min(max(failures, 1) - 1, 30))
    return full * (0.5 + random_0_1 / 2)
