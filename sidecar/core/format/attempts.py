"""Ids of attempts, and their order: which of two attempts began later."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from trainer_hook.contract import ContractError, epoch_seconds

_BEGAN = re.compile(r"(\d{8}T\d{6}Z)-(?:r(\d{1,9})\.([0-9a-f]{8})-)?", re.ASCII)
"""An id may begin with the attempt's start time in UTC, as the hook's do; a pod's own id may also name a JobSet restart."""
LONGEST = 128


@dataclass(frozen=True, slots=True)
class Restart:
    """The restart of a JobSet that a pod belongs to."""

    number: int
    jobset_uid: str


def of_pod(pod: str, *, since_s: float, restart: Restart | None = None) -> str:
    """Return the attempt for checkpoints of a single-node job whose markers name none.

    Args:
        pod: The pod's UID, or a substitute for it.
        since_s: When the pod began to use its volume, epoch seconds.
        restart: Restart of its JobSet; ``None``: it belongs to none. In a job of several nodes the restart could not identify
            the attempt: one pod can be replaced while the others stay, and two saves of a step would share the attempt.
    """
    began = datetime.fromtimestamp(since_s, UTC).strftime("%Y%m%dT%H%M%SZ")
    of = f"r{restart.number}.{restart.jobset_uid[:8]}-" if restart else ""
    return f"{began}-{of}{pod}"[:LONGEST]


def goes_after(attempt: str, created_at: str, their_attempt: str, their_created_at: str | None) -> bool:
    """Whether a checkpoint of one attempt is strictly later than a checkpoint of another attempt.

    Within one JobSet, the number of the restart decides, which depends on no clock. Otherwise the start times decide, if both
    ids contain them: a pod that outlived its attempt may finish a step late, and the step still belongs to the earlier
    attempt. Otherwise the time of finishing decides.
    """
    created_s = seconds(created_at), seconds(their_created_at) if their_created_at is not None else None
    return was_later(began(attempt), created_s[0], began(their_attempt), created_s[1])


@dataclass(frozen=True, slots=True)
class Began:
    """What an attempt's id says of its start."""

    at: str
    """Time in UTC, as text that sorts chronologically."""
    restart: Restart | None


def began(attempt: str) -> Began | None:
    """Return what an attempt's id says of its start; ``None``: nothing."""
    matched = _BEGAN.match(attempt)
    if matched is None:
        return None
    return Began(matched[1], None if matched[3] is None else Restart(int(matched[2]), matched[3]))


def was_later(
    began: Began | None,
    created_s: float | None,
    their_began: Began | None,
    their_created_s: float | None,
    *,
    epochs: tuple[int | None, int | None] = (None, None),
) -> bool:
    """Do as ``goes_after``, with parsed ids and times. ``None`` in place of a time: missing or malformed.

    If both were written under known epochs of the prefix (``epochs``: ours and theirs), the higher one is the later pod's,
    whatever the clocks of the pods say.
    """
    our_epoch, their_epoch = epochs
    if our_epoch is not None and their_epoch is not None and our_epoch != their_epoch:
        return our_epoch > their_epoch
    if began is not None and their_began is not None and (order := _order(began, their_began)):
        return order > 0
    return created_s is None or their_created_s is None or created_s > their_created_s


def began_later(attempt: str, than: str) -> bool:
    """Whether the ids alone say that an attempt began strictly later than another one."""
    ours, theirs = began(attempt), began(than)
    return ours is not None and theirs is not None and _order(ours, theirs) > 0


@dataclass(frozen=True, slots=True)
class Seen:
    """What a pod has seen of the order in which attempts began."""

    present: str | None = None
    """Attempt of the trainer that runs now, or ran last; ``None``: not known."""
    found_in: Mapping[str, int] = field(default_factory=dict)
    """The scan of the pod's volume that found each attempt's first checkpoint."""


NOTHING_SEEN = Seen()
"""Of the order of attempts: then their ids decide."""


def first_found(scan: int, *, was_there: bool, is_inherited: bool) -> int:
    """Return the number in ``Seen.found_in`` of an attempt whose first checkpoint is found by a scan.

    Args:
        scan: The scan, from 1 in each process; 0: before the first one.
        was_there: The checkpoint was on the volume when this process started: all these have the same number.
        is_inherited: An earlier pod left it: its attempts began before those of this pod.
    """
    if is_inherited:
        return 0
    return 1 if was_there else max(1, scan)


def seen_after(attempt: str, than: str, seen: Seen) -> bool | None:
    """Whether a pod has seen that an attempt began after another one, whatever the clocks of their ids say; ``None``: unknown.

    The trainer's present attempt is the latest. Attempts that different scans found first began in that order.
    """
    if attempt == than:
        return False
    if seen.present in (attempt, than):
        return attempt == seen.present
    found_in = seen.found_in
    if attempt in found_in and than in found_in and found_in[attempt] != found_in[than]:
        return found_in[attempt] > found_in[than]
    return None


def began_after(attempt: str, than: str, seen: Seen = NOTHING_SEEN) -> bool:
    """Whether an attempt began after another one: as the pod has seen it, else as their ids say."""
    is_after = seen_after(attempt, than, seen)
    return began_later(attempt, than) if is_after is None else is_after


def _order(ours: Began, theirs: Began) -> int:
    """Compare two starts; positive: ours was later, negative: theirs was, 0: the ids do not say."""
    one, other = ours.restart, theirs.restart
    if one and other and one.jobset_uid == other.jobset_uid and one.number != other.number:
        return one.number - other.number
    return (ours.at > theirs.at) - (ours.at < theirs.at)


def is_later(ours: str, theirs: str) -> bool:
    """Whether one timestamp is after another; a malformed one is before every valid one."""
    our_s, their_s = seconds(ours), seconds(theirs)
    return our_s is not None and (their_s is None or our_s > their_s)


def seconds(stamp: str) -> float | None:
    """Return a timestamp in epoch seconds, or ``None`` if it is malformed."""
    try:
        return epoch_seconds(stamp)
    except ContractError:
        return None
