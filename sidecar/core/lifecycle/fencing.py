"""Fencing: which of several pods of one job is the present one. Each that takes over claims the prefix with a higher epoch.

A claim is an object of its own, whose key has its epoch and its holder. So no store needs a conditional write for it: a pod
that takes over lists the claims, writes one with the next epoch, and lists again. The highest claim counts; of two with one
epoch, the one that was written first. Every other holder is fenced: it commits and deletes nothing any more.

Only a later pod takes over: one that started after the holder, as far as the store's clock shows. The clocks of the pods are
not used, except to measure how long ago a pod started.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, auto

from sidecar.core.format import checksum, keys
from sidecar.core.lifecycle.prefix_ownership import Run
from trainer_hook.contract import ContractError, Node
from trainer_hook.contract.typed_json import json_object, seconds

_CLAIM = re.compile(re.escape(keys.CLAIMS) + r"(\d{8})-([0-9a-f]{16})\.json", re.ASCII)
MOST_CLAIMS = 256
"""Number of claims in a store from which the oldest are deleted."""
KEPT_CLAIMS = 128
"""Number of claims that are kept then. A pod that was fenced that many take-overs ago would count as a new one."""
ENDING_SILENCE_S = 15.0
"""Least seconds without a sign of life after which a holder that is terminating counts as dead. Longer than for others, because
its heartbeats share the link with its last checkpoint."""
START_TOLERANCE_S = 30.0
"""Seconds by which the start of one pod must be after another's to count as later: requests take time, and a store lists times
in whole seconds. Of two closer ones, the one that claims later counts as the later; a terminating one only if the other is
silent."""
TURNS = 4
"""Number of take-overs within ``TURNS_WITHIN_S`` seconds that the log names: pods of the job may fence each other in turns."""
TURNS_WITHIN_S = 600.0
CLOCK_STEP_S = 2.0
"""Seconds by which a listed time may be in the future: stores list whole seconds."""
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
        return checksum.text_of(self.name.encode())

    def is_of(self, run: Run) -> bool:
        """Whether the pod is known to be of the run that owns the prefix: by the name of its job, or by ``CKPT_RUN_ID``."""
        return self.run_id is not None or (self.job is not None and run.job == self.job)


@dataclass(frozen=True, slots=True)
class Claim:
    """One pod's claim to the prefix."""

    epoch: int
    """From 1."""
    holder_id: str
    """16 hexadecimal digits, of the holder's name."""
    modified: str = field(default="", compare=False)
    """When it was written, by the store's clock, as text that sorts chronologically; empty: unknown."""

    @property
    def key(self) -> str:
        """Key of the claim in the store."""
        return f"{keys.CLAIMS}{self.epoch:08d}-{self.holder_id}.json"


@dataclass(frozen=True, slots=True)
class Claimed:
    """Content of a claim."""

    holder: str | None
    """Name of the pod; ``None``: unknown."""
    age_s: float | None
    """Seconds from the start of the pod to the claim, by its own clock; ``None``: unknown."""


def decode_claim(raw: bytes) -> Claimed:
    """Return the content of a claim. Malformed fields are unknown."""
    try:
        fields = json_object(raw, what="claim")
    except ContractError:
        return Claimed(None, None)
    holder, age_s = fields.get("holder"), None
    with contextlib.suppress(ContractError):
        age_s = seconds(fields, "age_s")
    return Claimed(holder if isinstance(holder, str) else None, age_s)


MOST_EPOCH = 10**7
"""Highest epoch that is believed, of a claim or in ``run.json``: no prefix is taken over that often. A key has eight digits."""
LONGEST_ENDING_S = 86_400.0
"""Longest grace period, which the settings allow: for no longer is a terminating holder waited for."""
LONGEST_BEAT_S = 300.0
"""Longest interval of a terminating holder's signs of life that is believed: the slowest store is faster."""


TWO_AT_ONCE_HINT = (
    "give each its own prefix in CKPT_STORE, or its node index "
    "(completionMode: Indexed, or CKPT_NODE_INDEX and CKPT_NODE_COUNT)"
)
"""Next step where two pods of one job are both meant to live: otherwise each takes the prefix over from the other."""


class ClaimState(Enum):
    """State of one pod among the claims."""

    HOLDER = auto()
    """Its claim is the highest."""
    FENCED = auto()
    """It had the highest claim once; a later pod has it now."""
    TIED = auto()
    """Another claim has the same epoch, the highest, and was written first: neither pod knew of the other (``after_tie``)."""
    NEW = auto()
    """It has no claim yet."""


def claims_among(listed: Iterable[tuple[str, str]]) -> list[Claim]:
    """Return the claims among listed objects (key and time of the write), the highest last.

    Other keys are ignored, as are epochs above ``MOST_EPOCH``.
    """
    found = [(_CLAIM.fullmatch(key), modified) for key, modified in listed]
    claims = in_order(Claim(int(match[1]), match[2], modified) for match, modified in found if match)
    return [claim for claim in claims if claim.epoch <= MOST_EPOCH]


def in_order(claims: Iterable[Claim]) -> list[Claim]:
    """Return claims, the highest last. Of those with one epoch, the one that was written first is the highest.

    A pod may be cut off between its reading of the claims and its own claim: when that arrives, another pod has this epoch.
    """
    ordered = sorted(claims, key=lambda claim: claim.holder_id)
    ordered.sort(key=lambda claim: claim.modified, reverse=True)
    ordered.sort(key=lambda claim: claim.epoch)
    return ordered


def claim_state(claims: Iterable[Claim], holder_id: str) -> ClaimState:
    """Return the state of the pod with this id."""
    ordered = in_order(claims)
    epochs = [claim.epoch for claim in ordered if claim.holder_id == holder_id]
    if not epochs:
        return ClaimState.NEW
    if ordered[-1].holder_id == holder_id:
        return ClaimState.HOLDER
    return ClaimState.TIED if max(epochs) == ordered[-1].epoch else ClaimState.FENCED


def rivals(claims: Iterable[Claim], own: Claim) -> list[Claim]:
    """Return the claims of other pods with the epoch of ``own``: they were written at the same time."""
    return [claim for claim in in_order(claims) if claim.epoch == own.epoch and claim.holder_id != own.holder_id]


class Tie(Enum):
    """Decision of a pod whose claim has the epoch of one that was written first."""

    CLAIM_AGAIN = auto()
    """It is the later pod: it claims the next epoch, which fences the other one."""
    GIVE_WAY = auto()
    """It is the earlier pod: it withdraws its claim and is fenced."""
    TWO_AT_ONCE = auto()
    """The other pod may be another job's: this one withdraws its claim and is refused."""


def after_tie(*, is_same_run: bool, is_earlier: bool) -> Tie:
    """Return the decision about a claim that another one of the same epoch precedes.

    Neither pod had seen the other's claim, so the time of the writes does not say which pod replaces which.

    Args:
        is_same_run: The other pod is known to be of this pod's run. Otherwise only a sign of life can decide, after a restart.
        is_earlier: The other pod started later (``started_later``).
    """
    if not is_same_run:
        return Tie.TWO_AT_ONCE
    return Tie.GIVE_WAY if is_earlier else Tie.CLAIM_AGAIN


def fencing_claim(claims: Iterable[Claim], own: Claim) -> Claim | None:
    """Return the claim that fences the pod of ``own``; ``None``: it holds the prefix, also if its own claim was deleted."""
    ordered = in_order(claims)
    if not ordered or ordered[-1].holder_id == own.holder_id:
        return None
    is_listed = any(claim == own for claim in ordered)
    highest = ordered[-1]
    return highest if is_listed or (highest.epoch, highest.holder_id) > (own.epoch, own.holder_id) else None


def seconds_of(modified: str) -> float | None:
    """Return the time of a write as a store lists it, in epoch seconds; ``None``: unknown.

    S3 lists RFC 3339, a folder nanoseconds in 20 digits.
    """
    if modified.isascii() and modified.isdigit() and len(modified) == 20:
        return int(modified) / 1e9
    try:
        at = datetime.fromisoformat(modified)
        return at.timestamp() if at.tzinfo else None
    except (ValueError, OverflowError):
        return None


@dataclass(frozen=True, slots=True)
class Arrival:
    """A starting pod by the store's clock, in epoch seconds."""

    began_s: float
    """When its first sidecar process began, or later by the time of a request at most."""
    now_s: float


def started_later(claim: Claim, claimed: Claimed | None, arrival: Arrival | None, *, is_ending: bool = False) -> bool:
    """Whether the pod of a claim started later than this one.

    Args:
        claim: The claim, as listed.
        claimed: Its content; ``None``: it was deleted.
        arrival: This pod; ``None``: the store tells no times.
        is_ending: This pod is terminating. Then it counts as the earlier one unless it is known to be the later one: a pod that
            goes must not end the training of one that stays. Otherwise it is the later one unless it is known to be earlier.

    A claim in the future means that the store's clock was set back, so that nothing is known.
    """
    at_s = seconds_of(claim.modified)
    if at_s is None or claimed is None or claimed.age_s is None or arrival is None or at_s > arrival.now_s + CLOCK_STEP_S:
        return False
    tolerance_s = -START_TOLERANCE_S if is_ending else START_TOLERANCE_S
    return at_s - claimed.age_s > arrival.began_s + tolerance_s


def has_ended(run: Run, claim: Claim) -> bool:
    """Whether the pod of a claim, which is the highest, has said in ``run.json`` that it commits nothing any more."""
    return run.epoch == claim.epoch and run.ending and run.ends_in_s is None


def takeovers_in_turns(claims: Iterable[Claim]) -> int | None:
    """Return how often the prefix was taken over within ``TURNS_WITHIN_S``, if often enough to say so; else ``None``."""
    times = [at_s for claim in claims if (at_s := seconds_of(claim.modified)) is not None]
    recent = sum(at_s > max(times) - TURNS_WITHIN_S for at_s in times)
    return recent if recent >= TURNS else None


def next_claim(claims: Iterable[Claim], holder_id: str, *, known_epoch: int = 0) -> Claim:
    """Return the claim with which a pod takes the prefix over.

    ``known_epoch``: that in ``run.json``, which counts where claims were deleted, for example by a lifecycle rule.
    """
    known_epoch = known_epoch if known_epoch < MOST_EPOCH else 0
    return Claim(max(known_epoch, *(claim.epoch for claim in claims), 0) + 1, holder_id)


def obsolete(claims: Iterable[Claim]) -> list[Claim]:
    """Return the claims that may be deleted: the oldest, once there are more than ``MOST_CLAIMS``."""
    ordered = in_order(claims)
    return ordered[:-KEPT_CLAIMS] if len(ordered) > MOST_CLAIMS else []


def ending_silence_s(beat_s: float | None, *, read_s: float) -> float:
    """Return the seconds without a sign of life after which a holder that is terminating counts as dead.

    Args:
        beat_s: Longest time between two of its signs of life, as it says itself; ``None``: unknown.
        read_s: Longest time that this pod needed to read the run, in seconds. Both are long if the store is slow.
    """
    return max(ENDING_SILENCE_S, 3 * min(beat_s or 0.0, LONGEST_BEAT_S) + 2 * read_s)


def waits_for_ending(first: Run, now: Run, *, me: str, watched_s: float, silent_s: float, read_s: float = 0.0) -> bool:
    """Whether a later pod waits for the holder, which is terminating and may still commit what this pod should resume from.

    Args:
        first: The run when this pod first read it.
        now: The run as it is now.
        me: Name of this pod.
        watched_s: Seconds since ``first`` was read, by this pod's clock.
        silent_s: Seconds since the last sign of life that this pod saw.
        read_s: Longest time that this pod needed to read the run, in seconds.
    """
    if not now.ending or now.holder in (None, me) or now.ends_in_s is None:
        return False
    known_s = first.ends_in_s if first.holder == now.holder and first.ends_in_s is not None else now.ends_in_s
    return watched_s < min(known_s, LONGEST_ENDING_S) and silent_s < ending_silence_s(now.beat_s, read_s=read_s)
