"""Whether something grows: the first third of a run beside its last third."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PIECES = 9
"""Parts of a run in each of which costs are averaged."""


@dataclass(frozen=True, slots=True)
class Bound:
    """How much larger the last third may be than the first: by a factor, and by an amount that is noise."""

    ratio: float
    more: float
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Growth:
    """One measure over a run."""

    name: str
    first: float
    """Median of the first third."""
    last: float
    per_hour: float
    bound: Bound

    @property
    def most(self) -> float:
        return self.first * self.bound.ratio + self.bound.more

    @property
    def is_flat(self) -> bool:
        return self.last <= self.most

    @property
    def ratio(self) -> float:
        """Last to first; ``nan`` where the first is 0."""
        return self.last / self.first if self.first else math.nan


def growth(name: str, series: Sequence[tuple[float, float]], bound: Bound) -> Growth:
    """Compare the thirds of a series of ``(seconds, value)``, by their medians.

    Raises:
        ValueError: There are too few values to compare.
    """
    third = len(series) // 3
    if third < 2:
        raise ValueError(f"{name}: {len(series)} values are too few to compare")
    first, last = series[:third], series[-third:]
    low, high = (statistics.median(value for _, value in part) for part in (first, last))
    apart_s = statistics.median(at_s for at_s, _ in last) - statistics.median(at_s for at_s, _ in first)
    return Growth(name, low, high, (high - low) / apart_s * 3600, bound)


def costs(series: Sequence[tuple[float, Mapping[str, float]]], cost: str, per: str) -> list[tuple[float, float]]:
    """Return what one more of ``per`` cost in each of ``PIECES`` equal parts of a run; both are counters.

    Costs that come in batches, such as those of retention, are spread. A part without any is left out.
    """
    edges = [series[round(number * (len(series) - 1) / PIECES)] for number in range(PIECES + 1)]
    found = []
    for (began_s, before), (at_s, after) in itertools.pairwise(edges):
        if (count := after[per] - before[per]) > 0:
            found.append(((began_s + at_s) / 2, (after[cost] - before[cost]) / count))
    return found


def table(grown: Sequence[Growth]) -> str:
    """Return one line per measure."""
    columns = ("first third", "last third", "ratio", "per hour", "allowed")
    lines = [f"{'':<34}" + "".join(f"{title:>13}" for title in columns)]
    for each in grown:
        name = f"{each.name}{f' [{each.bound.unit}]' if each.bound.unit else ''}"
        cells = (_short(each.first), _short(each.last), f"{each.ratio:.2f}", f"{each.per_hour:+.3g}", _short(each.most))
        lines.append(f"{name:<34}" + "".join(f"{cell:>13}" for cell in cells) + ("" if each.is_flat else "  GROWS"))
    return "\n".join(lines)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
