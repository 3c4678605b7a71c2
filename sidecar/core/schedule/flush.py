"""Flush plan: what is sent, in which order, after a termination notice (FORMAT.md, "The plan of a flush").

The plan is computed again after each change, from the bytes left, the measured rate and the deadline. Of all orders it takes
the one with the highest expected newest durable step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import combinations

from sidecar.core.format.readable import rate_text, seconds_text, size_text
from sidecar.core.schedule.order import Waiting, upload_order
from sidecar.core.schedule.throughput import Rate

SAMPLES = 9
"""Number of rates, from the lowest to the highest, at which each order is evaluated."""
MOST_CANDIDATES = 6
"""Maximum number of checkpoints whose order is optimised; the others follow, newest first."""
_NOTHING = 1e-9


class Outcome(Enum):
    """Whether a checkpoint will be durable by the deadline."""

    FITS = "fits"
    MAY_FIT = "may-fit"
    """Only at a higher rate than expected; or unknown, because no rate was measured."""
    NO_TIME = "no-time"
    """Not even at the highest rate measured, or the store refuses it: sent when nothing else is left to send."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Time that does not depend on bytes, in seconds."""

    request_s: float = 0.0
    """Cost of each request left, at full concurrency."""
    commit_s: float = 0.0
    """Time from the last byte to the commit; the link is free meanwhile."""


@dataclass(frozen=True, slots=True)
class Load:
    """Work left of one checkpoint."""

    waiting: Waiting
    left_bytes: int
    """Bytes to send, with those that the trainer is still expected to write."""
    left_requests: int = 0
    closed_bytes: int | None = None
    """Part of ``left_bytes`` that can be sent now; ``None``: all."""
    ready_in_s: float = 0.0
    """Seconds until the trainer has finished it; only then can the rest be sent and the commit be made."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One checkpoint of a plan."""

    name: str
    verdict: Outcome
    left_bytes: int
    done_in_s: float | None
    """Seconds until it is expected to be durable; ``None`` before any rate was measured."""
    reason: str | None
    """Why it is not expected to be durable by the deadline; ``None``: it is."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Checkpoints in sending order: the first one with bytes ready is sent, the others pause."""

    order: tuple[Planned, ...]

    def get(self, name: str) -> Planned | None:
        """Return the plan of a checkpoint by name; ``None``: it is not in the plan."""
        return next((planned for planned in self.order if planned.name == name), None)

    def rank(self) -> dict[str, int]:
        """Return the position of each checkpoint in the order, by name, from 0."""
        return {planned.name: place for place, planned in enumerate(self.order)}


def durable_in_s(order: Sequence[Load], *, bytes_per_s: float, costs: Costs = Costs()) -> dict[str, float]:
    """Return the seconds until each checkpoint is durable, by name, if they are sent in this order.

    The link is never idle while anything can be sent: while the first one waits for the trainer, the next one is sent.
    """
    now_s = 0.0
    done: dict[str, float] = {}
    closed, behind = {}, {}
    for load in order:
        total_s = load.left_bytes / bytes_per_s + load.left_requests * costs.request_s
        share = 1.0 if load.closed_bytes is None or not load.left_bytes else min(1.0, load.closed_bytes / load.left_bytes)
        closed[load.waiting.name], behind[load.waiting.name] = total_s * share, total_s * (1 - share)
    ready = {load.waiting.name: max(0.0, load.ready_in_s) for load in order}
    while len(done) < len(ready):
        for name in ready:
            if ready[name] <= now_s:
                closed[name], behind[name] = closed[name] + behind[name], 0.0
        for name in ready:
            if name not in done and closed[name] <= _NOTHING and behind[name] <= _NOTHING and ready[name] <= now_s:
                done[name] = now_s + costs.commit_s
        coming_s = min((at_s for at_s in ready.values() if at_s > now_s), default=float("inf"))
        first = next((name for name in ready if closed[name] > _NOTHING), None)
        if first is None:
            now_s = coming_s
            continue
        spent_s = min(closed[first], coming_s - now_s)
        closed[first] -= spent_s
        now_s = coming_s if spent_s == coming_s - now_s else now_s + spent_s
    return done


def plan_flush(
    loads: Iterable[Load], *, rate: Rate | None, left_s: float, newest_durable_step: int | None, costs: Costs = Costs()
) -> Plan:
    """Return the plan: the order of sending, and what will not be durable by the deadline, with the reason.

    Args:
        loads: All checkpoints that are not durable, also those still being written. Of equal names the last counts.
        rate: Measured rate; ``None``: unknown, and the upload order is kept.
        left_s: Seconds until the deadline.
        newest_durable_step: Step that a run would resume from if nothing more became durable; ``None``: none.
        costs: Time that does not depend on bytes.
    """
    by_name = {load.waiting.name: load for load in loads}
    ordered = [by_name[w.name] for w in upload_order(load.waiting for load in by_name.values())]
    if rate is None or rate.high <= 0:
        reason = "no rate has been measured yet" if rate is None else "nothing arrives in the store"
        return Plan(tuple(Planned(load.waiting.name, Outcome.MAY_FIT, load.left_bytes, None, reason) for load in ordered))
    chosen = _first_ones(ordered, rate, left_s, newest_durable_step, costs)
    return _planned(chosen, [load for load in ordered if load not in chosen], rate, left_s, costs)


def _first_ones(
    ordered: Sequence[Load], rate: Rate, left_s: float, newest_durable_step: int | None, costs: Costs
) -> list[Load]:
    """Return the sequence with the highest expected newest durable step.

    A step after a newer one adds nothing to that, so steps rise in the sequence: an older step precedes a newer one only where
    that is worth the risk of a late newer one. Ties: the shortest sequence, then the one with the newest steps.
    """
    base = -1 if newest_durable_step is None else newest_durable_step
    top = max([base, *(load.waiting.step or 0 for load in ordered)])
    gain = {load.waiting.name: _gain(load.waiting, base, top) for load in ordered}
    can = [
        load
        for load in ordered
        if gain[load.waiting.name] > 0
        and not load.waiting.refused
        and durable_in_s([load], bytes_per_s=rate.high, costs=costs)[load.waiting.name] <= left_s
    ]
    surest = sorted(can, key=lambda load: gain[load.waiting.name], reverse=True)[:1]
    if surest and _lands(surest[0], surest, rate.low, left_s, costs):
        return surest
    shortest = sorted(can[MOST_CANDIDATES - 1 :], key=lambda load: load.left_bytes)[:1]
    candidates = sorted([*can[: MOST_CANDIDATES - 1], *shortest], key=lambda load: gain[load.waiting.name])
    best: list[Load] = []
    best_gain = 0.0
    for count in range(1, len(candidates) + 1):
        for rising in reversed(list(combinations(candidates, count))):
            expected = _expected_gain(rising, gain, rate, left_s, costs)
            if expected > best_gain * (1 + _NOTHING):
                best, best_gain = list(rising), expected
    return best


def _gain(waiting: Waiting, base: int, top: int) -> int:
    # ``final`` without a step is the result of the whole run: it outranks every step.
    return (top + 1 if waiting.step is None else waiting.step) - base


def _expected_gain(rising: Sequence[Load], gain: Mapping[str, int], rate: Rate, left_s: float, costs: Costs) -> float:
    total = 0.0
    for bytes_per_s in rate.samples(SAMPLES):
        done = durable_in_s(rising, bytes_per_s=bytes_per_s, costs=costs)
        total += max((gain[name] for name, at_s in done.items() if at_s <= left_s), default=0)
    return total / SAMPLES


def _planned(chosen: list[Load], rest: Sequence[Load], rate: Rate, left_s: float, costs: Costs) -> Plan:
    sent, late, hopeless = list(chosen), [], []
    for load in rest:
        if not load.waiting.refused and _lands(load, [*sent, load], rate.expected, left_s, costs):
            sent.append(load)
        elif not load.waiting.refused and _lands(load, [load], rate.high, left_s, costs):
            late.append(load)
        else:
            hopeless.append(load)
    order = [*sent, *late, *hopeless]
    expected = durable_in_s(order, bytes_per_s=rate.expected or rate.high, costs=costs)
    planned = []
    for load in order:
        name = load.waiting.name
        fits = not load.waiting.refused and rate.expected > 0 and expected[name] <= left_s
        verdict = Outcome.FITS if fits else Outcome.NO_TIME if load in hopeless else Outcome.MAY_FIT
        why = None if fits else _why(load, expected[name], left_s, rate)
        planned.append(Planned(name, verdict, load.left_bytes, expected[name], why))
    return Plan(tuple(planned))


def _lands(load: Load, order: Sequence[Load], bytes_per_s: float, left_s: float, costs: Costs) -> bool:
    if bytes_per_s <= 0:
        return False
    return durable_in_s(order, bytes_per_s=bytes_per_s, costs=costs)[load.waiting.name] <= left_s


def _why(load: Load, done_in_s: float, left_s: float, rate: Rate) -> str:
    if load.waiting.refused:
        return "the store refuses it"
    return (
        f"{size_text(load.left_bytes)} are left and would be through in {seconds_text(done_in_s)} "
        f"at {rate_text(rate.expected)} with what goes first; {seconds_text(max(0.0, left_s))} are left"
    )
