"""Ids of attempts, and what they tell about which of two began later."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from trainer_hook.contract import ContractError, epoch_seconds

_BEGAN = re.compile(r"(\d{8}T\d{6}Z)-(?:r(\d{1,9})\.([0-9a-f]{8})-)?", re.ASCII)
"""An id may begin with when the attempt began, in UTC, as the hook's do; a pod's own may name a restart of a JobSet, too."""
LONGEST = 128


@dataclass(frozen=True, slots=True)
class Restart:
    """Which restart of a JobSet a pod belongs to."""

    number: int
    jobset_uid: str


def of_pod(pod: str, *, since_s: float, restart: Restart | None = None) -> str:
    """Return the attempt of checkpoints of a lone node whose markers name none.

    Args:
        pod: The pod's UID, or what stands for it.
        since_s: When the pod began to use its volume, epoch.
        restart: Of its JobSet, where it belongs to one. Of several nodes it could not be the attempt: one pod can be replaced
            while the others stay, and then parts of two writings of a step would have the same one.
    """
    began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(since_s))
    of = f"r{restart.number}.{restart.jobset_uid[:8]}-" if restart else ""
    return f"{began}-{of}{pod}"[:LONGEST]


def goes_after(attempt: str, created_at: str, their_attempt: str, their_created_at: str | None) -> bool:
    """Whether what one attempt wrote is strictly later than what another one did.

    Of one JobSet the number of the restart decides, which no clock can get wrong; else when they began, where both ids say so
    (a pod that outlived its attempt may still finish steps: they are late, and yet of the earlier attempt); else what was
    finished later.
    """
    ours, theirs = _BEGAN.match(attempt), _BEGAN.match(their_attempt)
    if ours is not None and theirs is not None:
        if ours[3] is not None and ours[3] == theirs[3] and int(ours[2]) != int(theirs[2]):
            return int(ours[2]) > int(theirs[2])
        if ours[1] != theirs[1]:
            return ours[1] > theirs[1]
    return their_created_at is None or is_later(created_at, their_created_at)


def is_later(ours: str, theirs: str) -> bool:
    """Whether an instant is after another one; what is not an instant is before everything."""
    our_s, their_s = seconds(ours), seconds(theirs)
    return our_s is None or their_s is None or our_s > their_s


def seconds(stamp: str) -> float | None:
    """Return an instant in epoch seconds, or ``None`` if it is not one."""
    try:
        return epoch_seconds(stamp)
    except ContractError:
        return None
