"""The present training line: a run that resumes from an older step starts a new line, and later steps of the old one end."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sidecar.core.format.attempts import NOTHING_SEEN, Began, Seen, began, goes_after, seconds, seen_after, was_later
from sidecar.core.format.found_checkpoint import Finished
from trainer_hook.contract import META_RESUMED_FROM, rfc3339, train_call_of


@dataclass(frozen=True, slots=True)
class Origin:
    """The commit from which an attempt continued, as its trainer recorded it."""

    step: int
    attempt: str | None


@dataclass(frozen=True, slots=True)
class Committed:
    """A commit, as far as retention needs it."""

    name: str
    step: int
    attempt: str
    created_at: str | None = None
    origin: Origin | None = None
    crc64nvme: str = ""
    """Checksum of the commit document; it identifies the commit among those of one step."""
    seen_s: float = 0.0
    """When this node first saw the commit, monotonic seconds."""
    modified: str = ""
    """Time of its write by the store's clock, as text that sorts chronologically; empty: unknown."""
    epoch: int | None = None
    """Epoch of the prefix under which it was written; ``None``: unknown."""
    train_call: int = 0
    """Which ``train()`` call wrote it, from 0."""


def was_finished_later(ours: Finished, theirs: Finished, seen: Seen = NOTHING_SEEN) -> bool:
    """Whether a checkpoint on the volume was finished later than another one; never one that was downloaded.

    Within one ``train()`` call of an attempt, a higher step is later, also if the clock was set back in between. A lower one is
    earlier where each start of the job is known to have an attempt of its own: with several nodes. Of two attempts, the pod may
    have ``seen`` which one began later: the clock that their ids are made of is that of the node of rank 0, which may change.
    Otherwise times decide.
    """
    if ours.restored_from is not None:
        return False
    if ours.is_inherited is not theirs.is_inherited:  # this pod's trainer began after the pod that left the other one
        return theirs.is_inherited
    if ours.attempt != theirs.attempt and theirs.restored_from is not None and not ours.is_inherited:
        return True  # this pod's trainer began with what it downloaded
    if _are_of_one_call(ours, theirs) and ours.resume_step is not None and theirs.resume_step is not None:
        if ours.resume_step > theirs.resume_step:
            return True
        if ours.resume_step < theirs.resume_step and ours.node.count > 1:
            return False
    if ours.attempt != theirs.attempt and (is_after := seen_after(ours.attempt, theirs.attempt, seen)) is not None:
        return is_after
    return goes_after(ours.attempt, rfc3339(ours.created_at_s), theirs.attempt, rfc3339(theirs.created_at_s))


def finished_later(ours: Finished, others: Iterable[Finished], seen: Seen = NOTHING_SEEN) -> int:
    """Return how many of the others were certainly finished later than a checkpoint. ``seen``: as for ``was_finished_later``.

    If a clock was set back between two saves of a lone node, either may be the later one.
    """
    return sum(_is_certainly_later(other, ours, seen) for other in others)


def _is_certainly_later(ours: Finished, theirs: Finished, seen: Seen) -> bool:
    is_later, is_earlier = was_finished_later(ours, theirs, seen), was_finished_later(theirs, ours, seen)
    if is_later is is_earlier is False:  # within a millisecond
        return ours.marked_at_s > theirs.marked_at_s
    return is_later and not is_earlier


def _are_of_one_call(ours: Finished, theirs: Finished) -> bool:
    is_named = ours.names_attempt and theirs.names_attempt  # otherwise it is one for all that the pod's trainers write
    return is_named and ours.attempt == theirs.attempt and train_call_of(ours.meta) == train_call_of(theirs.meta)


def origin_of(meta: Mapping[str, Any]) -> Origin | None:
    """Return the commit from which the attempt that wrote ``meta`` resumed; ``None``: not recorded, or malformed."""
    said = meta.get(META_RESUMED_FROM)
    step = said.get("step") if isinstance(said, dict) else None
    if not isinstance(said, dict) or not isinstance(step, int) or isinstance(step, bool) or step < 0:
        return None
    attempt = said.get("attempt")
    return Origin(step, attempt if isinstance(attempt, str) else None)


def present_line(commits: Iterable[Committed]) -> list[Committed]:
    """Return the commits of the present training line, newest step first.

    Iterates from the commit written last to the one written first. A commit is skipped if a lower or equal step was written
    after it: the run had resumed from an older step. If an attempt recorded its origin, the iteration continues there: steps of
    other attempts beyond the origin, and attempts between the two, are skipped.

    Two commits are ordered by their epochs and attempts (``core/format/attempts``), but an attempt is always later than the one
    from which it resumed, whatever clocks say. Commits without any other order are ordered by step.
    """
    # By step first: that is nearly always the order of writing already, so that thousands of commits are compared once each.
    by_step = sorted(commits, key=lambda commit: commit.step)
    known = {attempt: began(attempt) for attempt in {commit.attempt for commit in by_step}}
    writings = sorted((_Writing(commit, known[commit.attempt]) for commit in by_step), key=_KEY)
    ordered = [writing.commit for writing in reversed(writings)]
    attempts = known.keys()
    line: list[Committed] = []
    horizon = float("inf")
    origin: Origin | None = None
    parent: str | None = None
    for commit in ordered:
        if origin is not None and commit.attempt != line[-1].attempt:
            horizon = min(horizon, origin.step + 1)
            parent = origin.attempt if origin.attempt in attempts - {line[-1].attempt} else None
            origin = None
        if parent is not None and commit.attempt != parent:
            continue
        parent = None
        if commit.step < horizon:
            line.append(commit)
            horizon, origin = commit.step, commit.origin or origin
    return line


class _Writing:
    """A commit with its parsed times: comparisons are many."""

    __slots__ = ("began", "commit", "created_s")

    def __init__(self, commit: Committed, began_: Began | None) -> None:
        self.commit, self.began = commit, began_
        self.created_s = seconds(commit.created_at) if commit.created_at else None


def _by_writing(one: _Writing, other: _Writing) -> int:
    """Compare two commits by writing time; positive: ``one`` was written later."""
    ours, theirs = one.commit, other.commit
    if ours.attempt != theirs.attempt:
        continued = (ours.origin is not None and ours.origin.attempt == theirs.attempt) - (
            theirs.origin is not None and theirs.origin.attempt == ours.attempt
        )
        if continued:
            return continued
    epochs = ours.epoch, theirs.epoch
    after = was_later(one.began, one.created_s, other.began, other.created_s, epochs=epochs)
    before = was_later(other.began, other.created_s, one.began, one.created_s, epochs=epochs[::-1])
    return after - before or ours.step - theirs.step


_KEY = functools.cmp_to_key(_by_writing)
