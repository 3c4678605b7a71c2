"""Whether a pod may write below a prefix: a run's own restarts may, a second job that runs at the same time may not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

BEAT_S = 3.0
"""How often the holder of a prefix shows that it lives."""
SILENCE_S = 8.0
"""A holder that was not seen to beat for so long has died. By the clock of who watches: no two clocks are compared."""


@dataclass(frozen=True, slots=True)
class Run:
    """``run.json``: whose prefix it is."""

    run_id: str
    job: str | None = None
    """Namespace and name of the job in Kubernetes."""
    holder: str | None = None
    """Which volume of which pod node 0 has."""
    beat: int = 0
    ending: bool = False
    """The holder was told to end: the next pod of the same job may be there already."""


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
        first: The run as it was when the watch began.
        now: As it is.
        me: This pod's volume.
        job: This pod's job.
        watched_s: How long ago the watch began.

    Pods of one Kubernetes job replace each other: the later attempt goes first, whether the earlier one lives or not.
    """
    if now.holder in (None, me) or now.ending or (job is not None and now.job == job):
        return Verdict.OURS
    if (now.holder, now.beat) != (first.holder, first.beat):
        return Verdict.TWO_AT_ONCE
    return Verdict.OURS if watched_s >= SILENCE_S else Verdict.WATCH
