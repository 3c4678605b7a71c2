"""Whether a pod may write below a prefix: a run's own restarts may, a second job that runs at the same time may not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

LOOK_S = 2.0
"""How often the holder of a prefix looks whether it is asked for a sign of life: reading leaves no versions in a bucket."""
CHECK_S = 10.0
"""How often it looks whether the prefix is still its own."""
SILENCE_S = 8.0
"""A holder that was asked and not seen to beat for so long has died. By the clock of who asks: no two clocks are compared."""
MOST_ATTEMPTS = 16


@dataclass(frozen=True, slots=True)
class Run:
    """``run.json``: whose prefix it is."""

    run_id: str
    job: str | None = None
    """Namespace and name of the job in Kubernetes."""
    holder: str | None = None
    """Which volume of which pod node 0 has."""
    beat: int = 0
    """Grows with each sign of life."""
    ending: bool = False
    """The holder was told to end: the next pod of the same job may be there already."""
    attempts: tuple[str, ...] = ()
    """What node 0 said is its own, the latest last."""


class Verdict(Enum):
    """What a pod does about the run that it found."""

    OURS = auto()
    """It may write."""
    WATCH = auto()
    """Somebody else held the prefix: whether he lives is not known yet."""
    OTHER_RUN = auto()
    OTHER_JOB = auto()
    TWO_AT_ONCE = auto()
    """Somebody else holds the prefix now."""


def belongs(run: Run, *, run_id: str | None, job: str | None) -> Verdict:
    """Return whether a pod belongs to a run: by ``CKPT_RUN_ID`` where it is set, else by the job's name, else it joins."""
    if run_id is not None:
        return Verdict.OURS if run.run_id == run_id else Verdict.OTHER_RUN
    return Verdict.OTHER_JOB if job is not None and run.job is not None and run.job != job else Verdict.OURS


def may_hold(first: Run, now: Run, *, me: str, job: str | None, watched_s: float) -> Verdict:
    """Return whether node 0 of a job may hold the prefix.

    Args:
        first: The run as it was when its holder was asked for a sign of life.
        now: As it is.
        me: This pod's volume.
        job: This pod's job.
        watched_s: How long ago that was.

    Pods of one Kubernetes job replace each other: the later attempt goes first, whether the earlier one lives or not.
    """
    if now.holder in (None, me) or now.ending or (job is not None and now.job == job):
        return Verdict.OURS
    if (now.holder, now.beat) != (first.holder, first.beat):
        return Verdict.TWO_AT_ONCE
    return Verdict.OURS if watched_s >= SILENCE_S else Verdict.WATCH


def is_of_another(run: Run, *, me: str) -> bool:
    """Whether somebody else holds the prefix, and means to go on."""
    return run.holder not in (None, me) and not run.ending


def with_attempt(run: Run, attempt: str) -> Run:
    """Return the run after its holder has said that an attempt is its own."""
    others = [known for known in run.attempts if known != attempt]
    return replace(run, attempts=(*others[1 - MOST_ATTEMPTS :], attempt))


def why_not(run: Run, *, me: str, index: int, attempt: str) -> str | None:
    """Return why a node of a job of several may not write a checkpoint of an attempt yet, or ``None``.

    Only node 0 holds the prefix, so only node 0 of a second job would be refused. The others write what node 0 has said to be
    its own: nothing is committed without its part anyway.

    Args:
        run: As it is.
        me: This pod's volume.
        index: Of the node.
        attempt: Whose checkpoint it is.
    """
    if index == 0:
        other = is_of_another(run, me=me)
        return f"the prefix is held by {run.holder}: a later pod of this job, or another job" if other else None
    if attempt in run.attempts:
        return None
    holder = f" ({run.holder} does)" if run.holder else ""
    hint = "if its sidecar was refused, give this job its own prefix in CKPT_STORE"
    return f"node 0 of attempt {attempt} does not hold the prefix{holder}: {hint}"
