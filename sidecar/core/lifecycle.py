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


CONTAINERS_START_WITHIN_S = 60.0
"""A trainer may have begun this much earlier than the sidecar of its pod."""


def is_success_of_this_pod(
    *, updated_at_s: float | None, changed: bool, pod_since_s: float, ended_in_order_at_s: float | None
) -> bool:
    """Whether a trainer that is said to have succeeded is the one of this pod, not of an earlier one on the same volume.

    Args:
        updated_at_s: When it was said, in epoch seconds; ``None`` if that is not known.
        changed: It was said in this life of the sidecar.
        pod_since_s: When a sidecar of this pod looked at the volume for the first time.
        ended_in_order_at_s: When the life of the sidecar before this one ended with everything durable, if it did.

    A sidecar that is started again after the success must believe it, else the pod never ends; one of the next pod must
    not, else it ends before its trainer has begun.
    """
    if changed:
        return True
    if updated_at_s is None or updated_at_s < pod_since_s - CONTAINERS_START_WITHIN_S:
        return False
    return ended_in_order_at_s is None or ended_in_order_at_s < updated_at_s


def margin_s(grace_s: float) -> float:
    """Return the seconds kept back at the end of a grace period for the commit, the report and the exit itself."""
    return min(2.0, max(0.5, grace_s * 0.05))
