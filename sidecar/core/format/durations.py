"""Durations as people write them."""

from __future__ import annotations

import re

LONGEST_S = 100 * 366 * 86_400.0
"""Longest duration in seconds, so that arithmetic on durations stays finite."""
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}
_TERM = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*(ms|min|[smhdw])\s*", re.ASCII)


def duration_s(text: str) -> float:
    """Return the seconds that ``90``, ``90s``, ``2m``, ``1h30m`` or ``1.5 d`` stand for. A number without unit is in seconds.

    Raises:
        ValueError: Anything else, and more than ``LONGEST_S``.
    """
    rest, seconds = text.strip().lower(), 0.0
    if re.fullmatch(r"[0-9]{1,15}(?:\.[0-9]{1,9})?", rest, re.ASCII):
        rest += "s"
    while match := _TERM.match(rest):
        seconds += float(match[1]) * _UNIT_S[match[2]]
        rest = rest[match.end() :]
    if rest or not text.strip():
        raise ValueError("must be a duration such as 90s, 2m, 1h30m or 3d")
    if seconds > LONGEST_S:
        raise ValueError("must be at most 100 years")
    return seconds
