"""Save interval that loses the least time: Young 1974, Daly 2006, and what the link to the store carries."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sidecar.core.lifecycle.risk import upload_s


@dataclass(frozen=True, slots=True)
class Interval:
    """Seconds of training between two saves, and what is lost with them."""

    young_s: float
    daly_s: float
    upload_s: float | None
    """Upload of one checkpoint; ``None``: size or rate is not given."""
    interval_s: float
    """Daly's, or longer if one upload takes longer than a save and the training after it."""
    is_limited_by_link: bool
    young_lost_percent: float
    daly_lost_percent: float
    lost_percent: float
    """Share of the time that saves, work done twice and restarts take, with ``interval_s``."""
    save_steps: int | None
    """``interval_s`` in whole optimizer steps, at least 1; ``None``: their duration is not given."""


def plan_interval(
    *,
    stall_s: float,
    mtbf_s: float,
    restart_s: float,
    size_bytes: int | None = None,
    bytes_per_s: float | None = None,
    step_s: float | None = None,
) -> Interval:
    """Return the interval. A kill without notice is assumed.

    Args:
        stall_s: Time that a save holds training, more than 0.
        mtbf_s: Mean time between two kills of the run, more than 0.
        restart_s: Time from a kill until training goes on.
        size_bytes: Size of one checkpoint; ``None``: the link is not considered.
        bytes_per_s: Rate of the link; ``None``: the link is not considered.
        step_s: Duration of an optimizer step; ``None``: unknown.
    """
    sent_s = None if size_bytes is None or bytes_per_s is None else upload_s(size_bytes, bytes_per_s)
    young, daly = young_s(stall_s, mtbf_s), daly_s(stall_s, mtbf_s)
    least_s = (sent_s or 0.0) - stall_s
    interval_s = max(daly, least_s)
    again_s = restart_s + (sent_s or 0.0)
    lost = [lost_percent(at_s, stall_s=stall_s, mtbf_s=mtbf_s, restart_s=again_s) for at_s in (young, daly, interval_s)]
    return Interval(
        young_s=young,
        daly_s=daly,
        upload_s=sent_s,
        interval_s=interval_s,
        is_limited_by_link=least_s > daly,
        young_lost_percent=lost[0],
        daly_lost_percent=lost[1],
        lost_percent=lost[2],
        save_steps=None if step_s is None else max(1, _steps(interval_s / step_s, up=least_s > daly)),
    )


def young_s(stall_s: float, mtbf_s: float) -> float:
    """Return Young's first-order optimum, √(2 C M), in seconds."""
    return math.sqrt(2 * stall_s * mtbf_s)


def daly_s(stall_s: float, mtbf_s: float) -> float:
    """Return Daly's higher-order optimum in seconds (2006); the MTBF where a save takes twice that or longer."""
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    share = stall_s / (2 * mtbf_s)
    return young_s(stall_s, mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - stall_s


def lost_percent(interval_s: float, *, stall_s: float, mtbf_s: float, restart_s: float) -> float:
    """Return the percentage of the time that is lost (Daly 2006, complete cost function), 100 if the run makes no progress."""
    exponent = (interval_s + stall_s) / mtbf_s
    if exponent + restart_s / mtbf_s > 700:
        return 100.0
    return 100 * (1 - interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent)))


def _steps(steps: float, *, up: bool) -> int:
    return math.ceil(steps) if up else round(steps)
