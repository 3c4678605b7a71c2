"""Cost of lost work, and of checkpoints in S3."""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.core.commit.retention import surplus_steps
from sidecar.core.schedule.parts import MAX_PARTS, MIN_PART_BYTES, part_size, range_bytes, usual_part_bytes

WEEKS = 52
"""Weeks of a year, as the article counts."""
MONTH_S = 30 * 86_400.0
GIB = 1 << 30
"""S3 bills GB-months of 2³⁰ bytes."""
DOCUMENTS = 2
"""Objects of one checkpoint besides its files: manifest and commit."""
MOST_SAVES = 100_000
"""Saves per month, at most: retention is calculated step by step."""


@dataclass(frozen=True, slots=True)
class LostWork:
    """GPU cost of interruptions in dollars, without and with just-in-time checkpoints."""

    periodic_s: float
    """Seconds lost per week with periodic checkpoints alone."""
    jit_s: float
    """Seconds lost per week with just-in-time checkpoints."""
    periodic_week_usd: float
    jit_week_usd: float
    saved_week_usd: float
    saved_year_usd: float


def lost_work(
    *,
    cluster_hour_usd: float,
    interruptions: float,
    lost_s: float,
    restart_s: float,
    stalls_s: float,
    jit_stalls_s: float = 0.0,
) -> LostWork:
    """Return the GPU cost.

    Args:
        cluster_hour_usd: Price of all GPUs per hour in dollars.
        interruptions: Interruptions per week.
        lost_s: Training since the latest periodic checkpoint, for each interruption.
        restart_s: Time from an interruption until training goes on.
        stalls_s: Time per week that periodic saves hold training.
        jit_stalls_s: The same with just-in-time checkpoints, if periodic ones are saved besides.
    """
    periodic_s = interruptions * (lost_s + restart_s) + stalls_s
    jit_s = interruptions * restart_s + jit_stalls_s
    periodic_usd, jit_usd = (cluster_hour_usd * seconds / 3600 for seconds in (periodic_s, jit_s))
    return LostWork(
        periodic_s=periodic_s,
        jit_s=jit_s,
        periodic_week_usd=periodic_usd,
        jit_week_usd=jit_usd,
        saved_week_usd=periodic_usd - jit_usd,
        saved_year_usd=WEEKS * (periodic_usd - jit_usd),
    )


@dataclass(frozen=True, slots=True)
class Policy:
    """Saves and their retention in the store."""

    interval_s: float
    """Seconds between two saves, more than 0."""
    save_steps: int
    """Optimizer steps between two saves."""
    keep_newest: int | None
    """``CKPT_KEEP_STORE``; ``None``: all."""
    keep_every_steps: int | None
    """``CKPT_KEEP_EVERY_STEPS``; ``None``: no such steps."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of S3 in dollars."""

    gb_month_usd: float
    thousand_put_usd: float
    thousand_get_usd: float


@dataclass(frozen=True, slots=True)
class StoreCost:
    """Cost of a month of training in S3."""

    saves: int
    kept: int
    """Checkpoints in the store at the end of the month."""
    stored_bytes: int
    put_requests: int
    get_requests: int
    storage_month_usd: float
    requests_month_usd: float
    store_month_usd: float


def store_cost(*, size_bytes: int, files: int, policy: Policy, resumes: float, prices: Prices) -> StoreCost:
    """Return the cost of the first month, its storage as it is at the end of the month.

    Args:
        size_bytes: Size of one checkpoint.
        files: Its files, taken to be of equal size, at least 1.
        policy: Saves and their retention.
        resumes: Resumes per month; each fetches one checkpoint.
        prices: Prices of storage and requests.

    Raises:
        ValueError: There are more than ``MOST_SAVES`` saves a month.
    """
    if MONTH_S / policy.interval_s > MOST_SAVES:
        raise ValueError(f"must be at least {MONTH_S / MOST_SAVES:.0f} s: more saves than {MOST_SAVES} a month")
    saves = int(MONTH_S / policy.interval_s)
    kept = saves - _deleted(saves, policy)
    puts = saves * put_requests(size_bytes, files=files)
    file_bytes = _quotient_up(size_bytes, files)
    gets = round(resumes * (DOCUMENTS + files * max(1, _quotient_up(file_bytes, range_bytes(file_bytes)))))
    storage_usd = kept * size_bytes / GIB * prices.gb_month_usd
    requests_usd = (puts * prices.thousand_put_usd + gets * prices.thousand_get_usd) / 1000
    return StoreCost(saves, kept, kept * size_bytes, puts, gets, storage_usd, requests_usd, storage_usd + requests_usd)


def put_requests(size_bytes: int, *, files: int) -> int:
    """Return the requests that S3 bills as PUT for one checkpoint: objects, or parts with begin and end, and documents."""
    file_bytes = _quotient_up(size_bytes, files)
    wanted = usual_part_bytes(file_bytes, is_near=False, bytes_per_s=None)
    one_part = part_size(file_bytes, wanted_bytes=wanted, min_part_bytes=MIN_PART_BYTES, max_parts=MAX_PARTS)
    parts = max(1, _quotient_up(file_bytes, one_part))
    return files * (parts if parts == 1 else parts + 2) + DOCUMENTS


def _quotient_up(amount: int, by: int) -> int:
    return -(-amount // by)


def _deleted(saves: int, policy: Policy) -> int:
    if policy.keep_newest is None:
        return 0
    steps = (policy.save_steps * number for number in range(1, saves + 1))
    return len(surplus_steps(steps, keep_newest=policy.keep_newest, keep_every_steps=policy.keep_every_steps))
