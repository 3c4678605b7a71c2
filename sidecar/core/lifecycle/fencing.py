"""Fencing: which of several pods of one job is the present one. Each that takes over claims the prefix with a higher epoch.

A claim is an object of its own, whose key has its epoch and its holder. So no store needs a conditional write for it: a pod
that takes over lists the claims, writes one with the next epoch, and lists again. The highest claim counts; of two with one
epoch, the one with the higher holder id. Every other holder is fenced: it commits and deletes nothing any more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from sidecar.core.format import checksum, keys
from sidecar.core.lifecycle.prefix_ownership import Run
from trainer_hook.contract import Node

_CLAIM = re.compile(re.escape(keys.CLAIMS) + r"(\d{8})-([0-9a-f]{16})\.json", re.ASCII)
MOST_CLAIMS = 256
"""Number of claims in a store from which the oldest are deleted."""
KEPT_CLAIMS = 128
"""Number of claims that are kept then. A pod that was fenced that many take-overs ago would count as a new one."""
ENDING_SILENCE_S = 15.0
"""Seconds without a sign of life after which a holder that is terminating counts as dead. Longer than for others, because its
heartbeats share the link with its last checkpoint."""
ENDING_BEAT_S = 2.0
"""Interval in seconds of the signs of life of a holder that is terminating: a later pod waits for what it still commits."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A pod, as a holder of the prefix."""

    name: str
    """Of the pod and its volume."""
    is_unique: bool
    """The pod is named by its UID. Otherwise each start counts as a later pod: a machine may be used again."""
    node: Node | None
    job: str | None
    """Namespace and name of the pod's job; ``None``: unknown."""
    run_id: str | None
    """``CKPT_RUN_ID``; ``None``: not set."""

    @property
    def id(self) -> str:
        """16 hexadecimal digits of the name."""
        return checksum.to_text(checksum.checksum(self.name.encode()))

    def is_of(self, run: Run) -> bool:
        """Whether the pod is known to be of the run that owns the prefix: by the name of its job, or by ``CKPT_RUN_ID``."""
        return self.run_id is not None or (self.job is not None and run.job == self.job)


@dataclass(frozen=True, slots=True, order=True)
class Claim:
    """One pod's claim to the prefix, ordered as claims are."""

    epoch: int
    """From 1."""
    holder_id: str
    """16 hexadecimal digits, of the pod and its volume."""

    @property
    def key(self) -> str:
        """Key of the claim in the store."""
        return f"{keys.CLAIMS}{self.epoch:08d}-{self.holder_id}.json"


_MOST_KNOWN_EPOCH = 10**7
"""Epoch from which ``run.json`` is not believed: a claim's key has eight digits."""


class Standing(Enum):
    """Standing of one pod among the claims."""

    HOLDER = auto()
    """Its claim is the highest."""
    FENCED = auto()
    """It had the highest claim once; a later pod has it now."""
    NEW = auto()
    """It has no claim yet."""


def claims_among(listed: Iterable[str]) -> list[Claim]:
    """Return the claims among keys, lowest first. Other keys are ignored."""
    found = (_CLAIM.fullmatch(key) for key in listed)
    return sorted(Claim(int(match[1]), match[2]) for match in found if match)


def standing(claims: Iterable[Claim], holder_id: str) -> Standing:
    """Return the standing of the pod with this id."""
    ordered = sorted(claims)
    if ordered and ordered[-1].holder_id == holder_id:
        return Standing.HOLDER
    return Standing.FENCED if any(claim.holder_id == holder_id for claim in ordered) else Standing.NEW


def next_claim(claims: Iterable[Claim], holder_id: str, *, known_epoch: int = 0) -> Claim:
    """Return the claim with which a pod takes the prefix over.

    Args:
        claims: All claims.
        holder_id: Of the pod.
        known_epoch: The epoch in ``run.json``, which counts where claims were deleted, for example by a lifecycle rule.
    """
    known_epoch = known_epoch if 0 <= known_epoch < _MOST_KNOWN_EPOCH else 0
    return Claim(max(known_epoch, *(claim.epoch for claim in claims), 0) + 1, holder_id)


def obsolete(claims: Iterable[Claim]) -> list[Claim]:
    """Return the claims that may be deleted: the oldest, once there are more than ``MOST_CLAIMS``."""
    ordered = sorted(claims)
    return ordered[:-KEPT_CLAIMS] if len(ordered) > MOST_CLAIMS else []


def waits_for_ending(first: Run, now: Run, *, me: str, watched_s: float, silent_s: float) -> bool:
    """Whether a later pod waits for the holder, which is terminating and may still commit what this pod should resume from.

    Args:
        first: The run when this pod first read it.
        now: The run as it is now.
        me: Name of this pod.
        watched_s: Seconds since ``first`` was read, by this pod's clock.
        silent_s: Seconds since the last sign of life that this pod saw.
    """
    if not now.ending or now.holder in (None, me) or now.ends_in_s is None:
        return False
    known_s = first.ends_in_s if first.holder == now.holder and first.ends_in_s is not None else now.ends_in_s
    return watched_s < known_s and silent_s < ENDING_SILENCE_S
