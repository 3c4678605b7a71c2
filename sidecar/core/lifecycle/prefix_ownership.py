"""Ownership of a prefix in the store: restarts of a run may write below it, a second concurrent job may not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from sidecar.core.format.attempts import NOTHING_SEEN, Seen, began_after

ASK_POLL_S = 2.0
"""Interval in seconds at which the holder polls for requests for a sign of life. Reads leave no versions in a bucket."""
CHECK_S = 10.0
"""Interval in seconds at which the holder checks that it still holds the prefix."""
SILENCE_S = 8.0
"""Seconds without a beat after a request, from which a holder counts as dead. By the requester's clock alone."""
MOST_ATTEMPTS = 16


@dataclass(frozen=True, slots=True)
class Run:
    """``run.json``: the run that the prefix belongs to."""

    run_id: str
    job: str | None = None
    """Namespace and name of the job in Kubernetes."""
    holder: str | None = None
    """Pod and volume of node 0, which holds the prefix; ``None``: no holder."""
    beat: int = 0
    """Grows with each sign of life."""
    ending: bool = False
    """The holder is terminating: the next pod of the job may already be running."""
    attempts: tuple[str, ...] = ()
    """Attempts that node 0 has declared its own, latest last. A pod that takes over begins with none."""
    epoch: int = 0
    """Number of the holder's claim (``core/lifecycle/fencing``); 0: it has none."""
    ends_in_s: float | None = None
    """Seconds from the last sign of life to the deadline of a holder that is terminating."""
    beat_s: float | None = None
    """Longest seconds between two signs of life of a holder that is terminating, as far as it knows."""


class Ownership(Enum):
    """Ownership of a prefix from one pod's point of view."""

    OURS = auto()
    """This pod may write."""
    WATCH = auto()
    """Another pod held the prefix; whether it is alive is not known yet."""
    OTHER_RUN = auto()
    OTHER_JOB = auto()
    TWO_AT_ONCE = auto()
    """Another pod holds the prefix now."""


def belongs(run: Run, *, run_id: str | None, job: str | None) -> Ownership:
    """Return whether a pod belongs to a run: by ``CKPT_RUN_ID`` if set, else by the job's name, else it does."""
    if run_id is not None:
        return Ownership.OURS if run.run_id == run_id else Ownership.OTHER_RUN
    return Ownership.OTHER_JOB if job is not None and run.job is not None and run.job != job else Ownership.OURS


def may_hold(first: Run, now: Run, *, me: str, job: str | None, watched_s: float) -> Ownership:
    """Return whether node 0 of a job may hold the prefix.

    Args:
        first: The run when its holder was asked for a sign of life.
        now: The run as it is now.
        me: Name of this pod's volume.
        job: This pod's job; ``None``: unknown.
        watched_s: Seconds since ``first``.

    Pods of one Kubernetes job replace each other: the later attempt takes over, whether the earlier one is alive or not.
    """
    if now.holder in (None, me) or now.ending or (job is not None and now.job == job):
        return Ownership.OURS
    if gave_sign(first, now):
        return Ownership.TWO_AT_ONCE
    return Ownership.OURS if watched_s >= SILENCE_S else Ownership.WATCH


def gave_sign(first: Run, now: Run) -> bool:
    """Whether a holder gave a sign of life between two readings of the run."""
    return (now.holder, now.beat) != (first.holder, first.beat)


def is_of_another(run: Run, *, me: str) -> bool:
    """Whether another pod holds the prefix and is not terminating."""
    return run.holder not in (None, me) and not run.ending


def with_attempt(run: Run, attempt: str, seen: Seen = NOTHING_SEEN) -> Run:
    """Return the run with an attempt that its holder declares its own, in the order in which they began."""
    others = [known for known in run.attempts if known != attempt]
    at = next((place for place, known in enumerate(others) if began_after(known, attempt, seen)), len(others))
    before = others[max(0, len(others) + 1 - MOST_ATTEMPTS) : at]
    return replace(run, attempts=(*before, attempt, *others[at:][1 - MOST_ATTEMPTS :]))


def awaits_declaration(
    run: Run, *, claimed_epoch: int, attempt: str, known_epoch: int | None = None, has_later: bool = False
) -> str | None:
    """Return why a node above 0 has to wait until node 0 declares its attempts, or ``None``: it has.

    Args:
        run: The run as it is now.
        claimed_epoch: Epoch of the highest claim; 0: there is none, or it is not known.
        attempt: Attempt of the checkpoint.
        known_epoch: Epoch of the holder that had declared the attempt before; ``None``: none is known.
        has_later: A later attempt of this node is declared.
    """
    if claimed_epoch > run.epoch:  # or a late write of an earlier pod has replaced the holder's
        return "a later pod of node 0 is taking the prefix over; it declares its attempt first"
    if attempt in run.attempts:
        return None
    if not run.attempts:
        return f"node 0 has not declared attempt {attempt} its own yet"
    if known_epoch is None and not has_later:
        return f"node 0 has not declared attempt {attempt} its own yet, or a late write of an earlier pod hides that"
    if known_epoch is not None and run.epoch <= known_epoch:
        return f"a late write has replaced the document in which node 0 declared attempt {attempt} its own; it is written again"
    return None


def declared_later(attempts: Sequence[str], attempt: str, than: str) -> bool | None:
    """Whether an attempt is later than another one, by the declarations of the present holder; ``None``: it declared neither.

    ``attempts``: what the holder has declared, latest last. Attempts that it has not declared are of earlier pods.
    """
    if attempt not in attempts and than not in attempts:
        return None
    order = {known: number for number, known in enumerate(attempts)}
    return order.get(attempt, -1) > order.get(than, -1)


def refusal(run: Run, *, me: str, index: int, attempt: str, job: str | None) -> str | None:
    """Return why a node of a job with several nodes may not write a checkpoint yet, or ``None``.

    Only node 0 holds the prefix, so only node 0 of a second job is refused, and only an earlier node 0 is fenced. Others write
    the attempts that node 0 has declared its own; nothing is committed without node 0's part anyway.

    ``job``: this pod's, which is the run's; ``None``: unknown. Such a node need not wait for node 0's first declaration.
    """
    if index == 0:
        other = job is None and is_of_another(run, me=me)
        hint = "set CKPT_RUN_ID or JOB_NAME, so that pods know their job"
        return f"the prefix is held by {run.holder}: a later pod of this job, or another job; {hint}" if other else None
    if attempt in run.attempts or (job is not None and not run.attempts):
        return None
    holder = f" ({run.holder} does)" if run.holder else ""
    hint = "if its sidecar was refused, give this job its own prefix in CKPT_STORE"
    return f"node 0 of attempt {attempt} does not hold the prefix{holder}: {hint}"
