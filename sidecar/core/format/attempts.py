"""Ids of attempts, and their order: which of two attempts began later."""

from __future__ import annotations

import re
from dataclasses import dataclass
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


def goes_after(
    attempt: str,
    created_at: str,
    their_attempt: str,
    their_created_at: str | None,
    *,
    epochs: tuple[int | None, int | None] = (None, None),
) -> bool:
    """Whether a checkpoint of one attempt is strictly later than a checkpoint of another attempt.

    If both were written under known epochs of the prefix (``epochs``: ours and theirs), the higher one is the later pod's,
    whatever the clocks of the pods say. Otherwise, within one JobSet, the number of the restart decides, which depends on no
    clock. Otherwise the start times decide, if both ids contain them: a pod that outlived its attempt may finish a step late,
    and the step still belongs to the earlier attempt. Otherwise the time of finishing decides.
    """
    our_epoch, their_epoch = epochs
    if our_epoch is not None and their_epoch is not None and our_epoch != their_epoch:
        return our_epoch > their_epoch
    ours, theirs = _BEGAN.match(attempt), _BEGAN.match(their_attempt)
    if ours is not None and theirs is not None:
        if ours[3] is not None and ours[3] == theirs[3] and int(ours[2]) != int(theirs[2]):
            return int(ours[2]) > int(theirs[2])
        if ours[1] != theirs[1]:
            return ours[1] > theirs[1]
    return their_created_at is None or is_later(created_at, their_created_at)


def is_later(ours: str, theirs: str) -> bool:
    """Whether one timestamp is after another; a malformed one is before every valid one."""
    our_s, their_s = seconds(ours), seconds(theirs)
    return our_s is None or their_s is None or our_s > their_s


def seconds(stamp: str) -> float | None:
    """Return a timestamp in epoch seconds, or ``None`` if it is malformed."""
    try:
        return epoch_seconds(stamp)
    except ContractError:
        return None
