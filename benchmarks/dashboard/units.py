"""Values as Grafana writes them, for the units that the dashboard uses."""

from __future__ import annotations

import math

_TIMES = ((1, "s"), (60, "min"), (3600, "hours"), (86400, "days"))


def written(value: float, unit: str | None) -> str:
    """Return a value with its unit.

    Raises:
        KeyError: A unit that the dashboard did not use so far.
    """
    if unit == "s":
        return _seconds(value)
    if unit == "reqps":
        return f"{_short(value)} req/s"
    base, letters, suffix = {
        "none": (math.inf, [""], ""),
        "short": (1000.0, ["", " K", " Mil"], ""),
        "Bps": (1000.0, [" ", " k", " M", " G"], "B/s"),
        "bytes": (1024.0, [" ", " Ki", " Mi", " Gi", " Ti"], "B"),
    }[unit or "none"]
    power = 0
    while abs(value) >= base and power < len(letters) - 1:
        value, power = value / base, power + 1
    return f"{_short(value)}{letters[power]}{suffix}"


def ticks(lowest: float, highest: float, *, unit: str | None, decimals: int | None) -> list[float]:
    """Return three to six round numbers from 0, or below ``lowest``, to above ``highest``."""
    lowest, highest = min(lowest, 0.0), max(highest, 0.0)
    if highest == lowest:
        highest = 1.0
    base = 1024.0 ** int(math.log(max(highest, 1.0), 1024)) if unit == "bytes" else 1.0
    raw = (highest - lowest) / base / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = base * power * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw)
    if decimals == 0:
        step = max(1.0, math.ceil(step))
    first, last = math.floor(lowest / step), math.ceil(highest / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def _seconds(value: float) -> str:
    if 0 < abs(value) < 1:
        return f"{_short(value * 1000)} ms"
    size, name = next((size, name) for size, name in reversed(_TIMES) if abs(value) >= size or size == 1)
    return f"{_short(value / size)} {name}"


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
