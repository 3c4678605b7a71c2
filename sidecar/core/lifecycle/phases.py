"""Phases of the sidecar (FORMAT.md, "Lifecycle"). They only advance, except that a termination notice may be withdrawn."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

LONGEST_GRACE_S = 86_400.0
"""Maximum of ``CKPT_GRACE_SECONDS``. (The cluster autoscaler of Kubernetes waits for 600 s.)"""


class Phase(StrEnum):
    """See FORMAT.md."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    """A termination notice was given, and the trainer is still alive."""
    FLUSHING = "flushing"
    """The trainer has ended; the checkpoints that it finished are being made durable."""
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Situation:
    """Inputs of the next phase, at one instant."""

    ready: bool
    """The store was reached once, and the volume is watched."""
    notice: bool
    """A termination notice was given."""
    sigterm: bool
    """The sidecar got SIGTERM."""
    trainer_alive: bool
    trainer_succeeded: bool
    classic: bool
    everything_durable: bool
    deadline_passed: bool
    cut_short: bool
    """The sidecar got a second SIGTERM."""
    fenced: bool = False
    """A later pod of the job has taken the prefix over."""


def next_phase(phase: Phase, now: Situation) -> Phase:
    """Return the next phase; the same one if nothing changes.

    The process ends after SIGTERM, or, as a classic sidecar, when the trainer has succeeded and all is durable: otherwise the
    pod would never end. A fenced one ends with its trainer: it makes nothing durable any more.
    """
    if phase is Phase.DONE or now.cut_short:
        return Phase.DONE
    if now.fenced and (now.deadline_passed or not now.trainer_alive):
        return Phase.DONE
    if now.sigterm and (now.deadline_passed or (not now.trainer_alive and now.everything_durable)):
        return Phase.DONE
    if now.classic and now.trainer_succeeded and not now.trainer_alive and now.everything_durable:
        return Phase.DONE
    if now.sigterm or now.notice:
        ending = Phase.DRAINING if now.trainer_alive else Phase.FLUSHING
        return Phase.FLUSHING if phase is Phase.FLUSHING and now.sigterm else ending
    return Phase.RUNNING if now.ready else Phase.STARTING


CONTAINERS_START_WITHIN_S = 60.0
"""Seconds by which a trainer may have started before the sidecar of its pod."""


def is_success_of_this_pod(
    *, updated_at_s: float | None, changed: bool, pod_since_s: float, ended_in_order_at_s: float | None
) -> bool:
    """Whether a recorded success belongs to this pod's trainer, not to an earlier pod's on the same volume.

    Args:
        updated_at_s: When the success was recorded, epoch seconds; ``None``: unknown.
        changed: It was recorded while this sidecar process was running.
        pod_since_s: When a sidecar of this pod first used the volume, epoch seconds.
        ended_in_order_at_s: When the previous sidecar process ended with everything durable; ``None``: it did not.

    A sidecar that restarts after the success must accept it, or the pod never ends; a sidecar of the next pod must not, or it
    ends before its trainer has started.
    """
    if changed:
        return True
    if updated_at_s is None or updated_at_s < pod_since_s - CONTAINERS_START_WITHIN_S:
        return False
    return ended_in_order_at_s is None or ended_in_order_at_s < updated_at_s


RELEASE_S = 5.0
"""Longest delay of the exit, in seconds, by the message to later pods that they need not wait. Without it they wait longer."""
LEAST_RELEASE_S = 0.25
EXIT_S = 0.3
"""Seconds before the end of the grace period that the exit itself takes."""


def longest_release_s(kill_in_s: float | None) -> float:
    """Return the longest time in seconds for the release of the prefix at the end of the process.

    Args:
        kill_in_s: Seconds until the end of the grace period, 0 if the end is wanted at once; ``None``: unknown.

    If everything is durable, the release may take the rest of the flush. After the deadline it matters less: later pods know
    the deadline and do not wait beyond it.
    """
    if kill_in_s is None:
        return LEAST_RELEASE_S
    return min(RELEASE_S, max(LEAST_RELEASE_S, kill_in_s - EXIT_S))


COMMIT_CHECK_S = 1.0
"""Longest delay of the exit, in seconds, by a check whether other nodes have committed what this node would give up."""
REPORT_S = 0.25
"""Seconds that the exit report may take."""


def longest_commit_check_s(kill_in_s: float | None) -> float:
    """Return the longest time in seconds for the check of the commits before the exit; 0: it is skipped.

    Args:
        kill_in_s: Seconds until the end of the grace period, 0 if the end is wanted at once; ``None``: unknown.
    """
    return COMMIT_CHECK_S if kill_in_s is None else min(COMMIT_CHECK_S, max(0.0, kill_in_s - REPORT_S - EXIT_S))


def margin_s(grace_s: float) -> float:
    """Return the seconds at the end of a grace period that are reserved for the commit, the report and the exit."""
    return min(2.0, max(0.5, grace_s * 0.05))
