"""Whether training is safe at this instant, in one word and one sentence, and what a SIGTERM or a kill would cost.

Page, API, CLI and metrics all show this answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from sidecar.core.format.readable import seconds_text, size_text
from sidecar.core.lifecycle.phases import Phase
from sidecar.core.lifecycle.store_state import StoreState
from sidecar.core.lifecycle.volume_space import is_nearly_full

LONG_S = 3600.0
"""Seconds at risk that need attention: as the alert CheckpointTimeAtRisk."""


class Level(StrEnum):
    """How safe training is."""

    SAFE = "safe"
    UNKNOWN = "unknown"
    """Nothing was measured yet, or nobody trains."""
    ATTENTION = "attention"
    """A preemption would cost training time, or soon will."""
    DANGER = "danger"
    """State that the trainer finished is lost, or nothing becomes durable now."""


STORE_AGAIN = {
    StoreState.AWAY: ("The store cannot be used", "it answers again"),
    StoreState.SILENT: ("The store does not answer", "it does"),
    StoreState.REFUSES: ("The store refuses uploads", "it takes them"),
    StoreState.FULL: ("The store is full", "it has space"),
}
"""Why nothing becomes durable, and what ends that."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the answer depends on, at one instant. ``None``: not known."""

    phase: Phase
    trains: bool
    """A training process runs, or is assumed to."""
    sees_trainer: bool
    """A training process with the hook is, or was, there."""
    has_begun: bool
    """A step was reported, or there is no hook that would."""
    durable_step: int | None
    steps_at_risk: int | None
    seconds_at_risk: float | None
    fits_grace: bool | None
    predicted_durable_s: float | None
    grace_s: float
    store: StoreState
    store_quiet_s: float | None
    """Seconds since the store last answered; ``None``: it never did."""
    still_s: float
    """Seconds for which uploads that are under way have not moved."""
    pending: int
    """Checkpoints that are finished and not durable."""
    late: int = 0
    """Checkpoints that the flush plan expects to miss the deadline."""
    given_up: int = 0
    rejected: int = 0
    """Rejected checkpoints that are newer than every durable one."""
    quarantined: int = 0
    fails_again: bool = False
    """A request fails again and again."""
    lease: str | None = None
    """Why this pod must not write to the store; ``None``: it may."""
    is_fenced: bool = False
    is_resuming: bool = False
    free_bytes: int | None = None
    """Free space of the volume."""
    volume_bytes: int | None = None
    checkpoint_bytes: int | None = None
    """Size of the newest checkpoint."""


NOT_KNOWN = "not known"


@dataclass(frozen=True, slots=True)
class Cost:
    """Training that would be lost, such as ``67 steps``, and why, or how it is known."""

    lost: str
    why: str


@dataclass(frozen=True, slots=True)
class Safety:
    """The answer. ``reasons`` is what needs attention, most important first, without the headline."""

    level: Level
    headline: str
    reasons: tuple[str, ...] = ()


def safety(facts: Facts) -> Safety:
    """Return whether training is safe now."""
    found = [*_dangers(facts), *_worries(facts), *_doubts(facts)]
    if found:
        level, headline = found[0]
        return Safety(level, headline, tuple(text for _, text in found[1:]))
    return Safety(*_calm(facts))


def cost_text(lost: str, why: str) -> str:
    """Return a cost as a line says it, such as ``costs 67 steps: the store cannot be used``."""
    text = f"cost {NOT_KNOWN}" if lost == NOT_KNOWN else f"costs {lost}"
    return f"{text}: {why}" if why else text


def cost_of_kill(facts: Facts) -> Cost:
    """Return what is lost if the pod is killed now, without any notice: all since the newest durable step."""
    if not facts.has_begun:
        return Cost("nothing", "training has not begun")
    why = f"{_trained(facts.seconds_at_risk)} of training" if facts.trains and facts.seconds_at_risk else ""
    if facts.steps_at_risk == 0 or (not facts.trains and not facts.pending):
        return Cost("nothing", "everything trained is durable" if facts.trains else "nobody trains")
    if facts.steps_at_risk is not None:
        return Cost(_steps(facts.steps_at_risk), why if facts.trains else "nobody trains")
    if facts.seconds_at_risk is None:
        return Cost(NOT_KNOWN, "no checkpoint was finished yet")
    return Cost(_trained(facts.seconds_at_risk), "of training")


def cost_of_sigterm(facts: Facts) -> Cost:
    """Return what is lost if the pod gets SIGTERM now: nothing only where a save then would be durable in time."""
    kill = cost_of_kill(facts)
    if not facts.trains or not facts.has_begun:
        return kill
    if (why := STORE_AGAIN.get(facts.store)) is not None:
        return Cost(kill.lost, f"{why[0][0].lower()}{why[0][1:]}")
    if not facts.sees_trainer:
        return Cost(kill.lost, "without the hook nothing is saved then")
    if facts.store is StoreState.UNKNOWN:
        return Cost(NOT_KNOWN, _silence(facts))
    if facts.fits_grace is None:
        return Cost(NOT_KNOWN, _not_measured(facts))
    if facts.fits_grace:
        return Cost("nothing", f"durable in {seconds_text(facts.predicted_durable_s)} of {seconds_text(facts.grace_s)} grace")
    return Cost(
        kill.lost, f"needs {seconds_text(facts.predicted_durable_s)}, the grace period is {seconds_text(facts.grace_s)}"
    )


def _silence(facts: Facts) -> str:
    if facts.store_quiet_s is None:
        return "the store has not been asked yet"
    if facts.store_quiet_s < facts.still_s:
        return f"uploads have not moved for {seconds_text(facts.still_s)}, though the store answers other requests"
    return f"the store has not answered for {seconds_text(facts.store_quiet_s)}"


def _not_measured(facts: Facts) -> str:
    has_finished = facts.durable_step is not None or facts.pending
    return "no upload was measured yet" if has_finished else "no checkpoint was finished yet"


def _dangers(facts: Facts) -> Iterator[tuple[Level, str]]:
    if facts.is_fenced:
        yield Level.DANGER, "Another pod has taken this run over: nothing that is trained here becomes durable"
    if facts.given_up:
        yield Level.DANGER, f"{_checkpoints(facts.given_up)} of this run will not become durable"
    if facts.late:
        yield Level.DANGER, f"{_checkpoints(facts.late)} will probably not be durable by the deadline"
    if (unusable := STORE_AGAIN.get(facts.store)) is not None and (facts.trains or facts.pending):
        yield Level.DANGER, "{}: nothing becomes durable until {}".format(*unusable)
    if facts.rejected:
        yield Level.DANGER, f"{_checkpoints(facts.rejected)} on the volume cannot be used, and nothing newer is durable"


def _worries(facts: Facts) -> Iterator[tuple[Level, str]]:
    if (unusable := STORE_AGAIN.get(facts.store)) is not None:
        if not (facts.trains or facts.pending):
            yield Level.ATTENTION, unusable[0]
    elif facts.fails_again:
        yield Level.ATTENTION, "A request to the store fails again and again, although others succeed"
    if facts.lease is not None and not facts.is_fenced:
        yield Level.ATTENTION, "Uploads wait for another pod of this run"
    is_too_long = facts.fits_grace is False and facts.predicted_durable_s is not None
    if is_too_long and facts.trains and facts.sees_trainer and facts.phase is Phase.RUNNING:
        yield (
            Level.ATTENTION,
            f"A save at SIGTERM does not fit: it takes {seconds_text(facts.predicted_durable_s)}, "
            f"the grace period is {seconds_text(facts.grace_s)}",
        )
    if facts.trains and (at_risk_s := facts.seconds_at_risk or 0.0) > LONG_S:
        yield Level.ATTENTION, f"{_trained(at_risk_s)} of training are not durable"
    yield from _space(facts)
    if facts.quarantined:
        yield (
            Level.ATTENTION,
            f"{_checkpoints(facts.quarantined)} in the store failed verification (bad); older ones are used instead",
        )


def _space(facts: Facts) -> Iterator[tuple[Level, str]]:
    free, total, size = facts.free_bytes, facts.volume_bytes, facts.checkpoint_bytes
    if free is None or total is None or not is_nearly_full(free, total, checkpoint_bytes=size):
        return
    need = f", a checkpoint takes {size_text(size)}" if size is not None else ""
    yield Level.ATTENTION, f"The volume is nearly full: {size_text(free)} are free{need}"


def _doubts(facts: Facts) -> Iterator[tuple[Level, str]]:
    if (
        facts.store is StoreState.UNKNOWN
        and facts.phase is not Phase.DONE
        and (facts.pending or (facts.trains and facts.sees_trainer))
    ):
        yield Level.UNKNOWN, f"Not known: {_silence(facts)}"


def _calm(facts: Facts) -> tuple[Level, str]:
    if facts.phase in (Phase.DRAINING, Phase.FLUSHING):
        what = "everything finished is durable" if not facts.pending else "everything finished fits before the deadline"
        return Level.SAFE, f"The pod is ending: {what}"
    if facts.phase is Phase.DONE:
        return Level.SAFE, "The sidecar has ended: everything finished is durable"
    if facts.is_resuming:
        return Level.UNKNOWN, "A checkpoint is being fetched to resume from"
    if facts.phase is Phase.STARTING:
        return Level.UNKNOWN, "The sidecar is starting"
    if not facts.has_begun:
        return Level.UNKNOWN, "Training has not begun"
    if not facts.trains:
        what = (
            "everything finished is durable" if not facts.pending else f"{_checkpoints(facts.pending)} on the way to the store"
        )
        return (Level.SAFE if facts.sees_trainer else Level.UNKNOWN), f"Nobody trains; {what}"
    if not facts.sees_trainer:
        what = "nothing of this pod is durable yet" if facts.durable_step is None else f"step {facts.durable_step} is durable"
        return Level.UNKNOWN, f"No hook is seen, so nothing is saved at SIGTERM; {what}"
    if facts.fits_grace is None:
        return Level.UNKNOWN, f"Not known yet: {_not_measured(facts)}"
    if facts.durable_step is None and facts.pending:
        return Level.SAFE, "The first checkpoint is on its way; a save at SIGTERM fits the grace period"
    return Level.SAFE, "Training is safe: a save at SIGTERM fits the grace period"


def _checkpoints(count: int) -> str:
    return "One checkpoint" if count == 1 else f"{count} checkpoints"


def _steps(count: int) -> str:
    return f"{count:,} step{'' if count == 1 else 's'}"


def _trained(seconds: float) -> str:
    """Return a time of training, from 2 minutes on in whole ones: what changes each second cannot be read."""
    return seconds_text(seconds if seconds < 120 else seconds // 60 * 60)
