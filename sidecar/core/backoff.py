"""How long to wait before trying again."""

from __future__ import annotations

FIRST_S = 0.5
CAP_S = 30.0


def delay_s(failures: int, *, random_0_1: float, first_s: float = FIRST_S, cap_s: float = CAP_S) -> float:
    """Return the seconds to wait after ``failures`` failures in a row (from 1 on).

    Doubles up to ``cap_s``; then a random half of it is taken off, so that many nodes do not come back together.
    """
    full = min(cap_s, first_s * 2.0 ** min(max(failures, 1) - 1, 30))
    return full * (0.5 + random_0_1 / 2)
