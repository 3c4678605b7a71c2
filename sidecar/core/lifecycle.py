"""Phases of the sidecar (FORMAT.md, "Lifecycle"): forwards only, except that a notice may turn out to be void."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """See FORMAT.md."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    """The pod is known to be going and the trainer is still alive."""
    FLUSHING = "flushing"
    """The trainer is gone; what it finished is being made durable."""
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Situation:
    """All that decides the next phase, at one instant."""

    ready: bool
    """The store was reached once and the volume is watched."""
    notice: bool
    """Somebody said that the pod is going."""
    sigterm: bool
    """The sidecar itself was told to end."""
    trainer_alive: bool
    trainer_succeeded: bool
    classic: bool
    everything_durable: bool
    deadline_passed: bool
    cut_short: bool
    """A second SIGTERM."""


def next_phase(phase: Phase, now: Situation) -> Phase:
    """Return the phase that follows from the situation; the same one if nothing changes.

    The process ends only when it was told to, or, as a classic sidecar, when the trainer succeeded and all is durable:
    otherwise the pod would never end.
    """
    if phase is Phase.DONE or now.cut_short:
        return Phase.DONE
    if now.sigterm and (now.deadline_passed or (not now.trainer_alive and now.everything_durable)):
        return Phase.DONE
    if now.classic and now.trainer_succeeded and not now.trainer_alive and now.everything_durable:
        return Phase.DONE
    if now.sigterm or now.notice:
        going = Phase.DRAINING if now.trainer_alive else Phase.FLUSHING
        return Phase.FLUSHING if phase is Phase.FLUSHING and now.sigterm else going
    return Phase.RUNNING if now.ready else Phase.STARTING


def margin_s(grace_s: float) -> float:
    """Return the seconds kept back at the end of a grace period for the commit, the report and the exit itself."""
    return min(2.0, max(0.5, grace_s * 0.05))
