"""Amounts and times as people read them: decimal units, and no more digits than anybody compares."""

from __future__ import annotations

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86_400
_LONGEST_S = 100 * 365 * _DAY_S


def size_text(size_bytes: float | None) -> str:
    """Return an amount with three digits and a decimal unit, such as ``191 MB``; a dash for ``None``."""
    if size_bytes is None:
        return "–"
    amount, unit = float(size_bytes), 0
    while amount >= 999.5 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1000, unit + 1
    return f"{amount:.0f} {_UNITS[unit]}" if amount >= 100 else f"{amount:.3g} {_UNITS[unit]}"


def rate_text(bytes_per_s: float | None) -> str:
    """Return a rate such as ``200 MB/s``; a dash for ``None``."""
    return "–" if bytes_per_s is None else f"{size_text(bytes_per_s)}/s"


def seconds_text(seconds: float | None) -> str:
    """Return a time such as ``0.04 s``, ``95 s``, ``4 min 10 s``, ``2 h 5 min`` or ``3 d 4 h``; a dash for ``None``."""
    if seconds is None:
        return "–"
    if seconds < 0:
        return f"-{seconds_text(-seconds)}"
    if seconds > _LONGEST_S:
        return "more than 100 years"
    if seconds < 9.95:
        return f"{_short(f'{seconds:.2f}' if seconds < 0.995 else f'{seconds:.1f}')} s"
    total = round(seconds)
    if total < 100:
        return f"{total} s"
    if total < _HOUR_S:
        return _two(total, _MINUTE_S, "min", 1, "s")
    if total < _DAY_S:
        return _two(total, _HOUR_S, "h", _MINUTE_S, "min")
    return _two(total, _DAY_S, "d", _HOUR_S, "h")


def _short(number: str) -> str:
    return number.rstrip("0").rstrip(".")


def _two(total_s: int, large_s: int, large: str, small_s: int, small: str) -> str:
    rest = total_s % large_s // small_s
    return f"{total_s // large_s} {large}" + (f" {rest} {small}" if rest else "")
