"""Retention: which checkpoints are deleted, on the volume and in the store, and why. The cleaner executes the plans."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from sidecar.core.commit.training_line import Committed, present_line
from trainer_hook.contract import Node

_ONE_NEWER = "a newer one is committed and was seen whole"
TURN_S = 30.0
"""Seconds between two nodes' turns of retention: longer than a commit takes to settle, so that the next finds nothing to do."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A durable checkpoint on the volume that could be deleted. ``step`` ``None`` (``final``) is never deleted."""

    name: str
    step: int | None
    size_bytes: int = 0
    protected: str | None = None
    """Why it must stay, for example because the run resumes from it; ``None``: it may be deleted."""


@dataclass(frozen=True, slots=True)
class PendingCopy:
    """A checkpoint on the volume that is finished and not durable yet."""

    name: str
    finished_at_s: float
    """Epoch seconds."""
    size_bytes: int
    is_deleted: bool
    """The trainer has deleted its directory: the sidecar's hard links alone hold its files."""
    is_sending: bool = False
    """Its upload has begun: its space is free only once its files are closed."""
    is_shared: bool = False
    """Other nodes have parts of it."""
    later: int = 0
    """Number of other such checkpoints that were certainly finished later, also if the clock was set back in between."""


@dataclass(frozen=True, slots=True)
class Deletion:
    """One deletion of a plan, with its reason."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Retention plan of the store: the deletions, and the old steps that stay nevertheless, each with its reason."""

    deletions: list[Deletion]
    kept: list[Deletion]
    retained: list[Deletion] = field(default_factory=list, compare=False)
    """The steps that the policy keeps, with its reason."""


def plan_local_deletion(
    durable: Iterable[Kept], *, keep_newest: int, free_bytes: int, min_free_bytes: int, keep_least: int = 1
) -> list[Deletion]:
    """Return the durable local directories to delete: all but the ``keep_newest`` newest; fewer stay when space is short.

    Args:
        durable: Committed checkpoints on the volume.
        keep_newest: At least 1.
        free_bytes: Free space of the volume now.
        min_free_bytes: The disk guard, ``CKPT_MIN_FREE``, or the size of the next checkpoint.
        keep_least: Number of newest ones that stay even then; 0: the next checkpoint is worth more than a local copy.
    """
    by_step = {c.step: c for c in durable if c.step is not None}
    steps = [by_step[step] for step in sorted(by_step, reverse=True)]
    plan = [Deletion(c.name, f"durable, and {keep_newest} newer kept") for c in steps[keep_newest:] if c.protected is None]
    missing = min_free_bytes - free_bytes - sum(c.size_bytes for c in steps[keep_newest:] if c.protected is None)
    for checkpoint in reversed(steps[keep_least:keep_newest]):
        if missing <= 0:
            break
        if checkpoint.protected is None:
            plan.append(Deletion(checkpoint.name, f"durable, and less than {min_free_bytes} bytes are free"))
            missing -= checkpoint.size_bytes
    return plan


def plan_release(pending: Iterable[PendingCopy], *, free_bytes: int, wanted_bytes: int) -> list[PendingCopy]:
    """Return the checkpoints whose pins are released: not durable yet, and deleted by the trainer.

    Only the sidecar's hard links hold their files. The newest one never goes; of a job with several nodes the newest two: the
    other nodes may not have finished the last. If a clock was set back, all that may be the newest stay. Those whose upload has
    not begun go first, of these the oldest. Nothing goes where all together would not be enough.
    """
    copies, missing_bytes, plan = list(pending), wanted_bytes - free_bytes, list[PendingCopy]()
    keep_newest = 2 if any(copy.is_shared for copy in copies) else 1
    older = [copy for copy in copies if copy.is_deleted and copy.later >= keep_newest]
    for copy in sorted(older, key=lambda copy: (copy.is_sending, -copy.later, copy.finished_at_s)):
        if missing_bytes > 0:
            plan.append(copy)
            missing_bytes -= copy.size_bytes
    return [] if missing_bytes > 0 else plan


def surplus_steps(steps: Iterable[int], *, keep_newest: int, keep_every_steps: int | None) -> list[int]:
    """Return the steps in the store that could be deleted, judged by the steps alone, newest first."""
    older = sorted(steps, reverse=True)[keep_newest:]
    return [step for step in older if not _stays_for_ever(step, keep_every_steps)]


def turn_after_s(node: Node | None) -> float:
    """Return the delay of a node's turn in seconds. No node knows which others are alive, and one turn is enough."""
    return 0.0 if node is None else TURN_S * node.index


def plan_store_deletion(
    committed: Iterable[Committed],
    *,
    whole: Collection[str],
    keep_newest: int,
    keep_every_steps: int | None,
    protected: Mapping[str, str] = types.MappingProxyType({}),
    line: Iterable[Committed] | None = None,
) -> StorePlan:
    """Return the retention plan of the store (I7).

    A commit is deleted only if at least ``keep_newest`` commits of higher steps on the present training line were verified as
    whole. So the highest step always stays. Damaged, quarantined or abandoned-line commits do not count towards
    ``keep_newest``. Those are deleted by the same rule, so not before an older good one. The newer commits must also have been
    written no earlier, by this node's observation and by the store's clock, whatever attempts and pod clocks say. The last
    commit of each ``train()`` call stays: in a new pod, the script begins with its first call.

    Args:
        committed: All readable committed steps of the run.
        whole: Names of those that were verified as whole.
        keep_newest: ``CKPT_KEEP_STORE``, at least 1.
        keep_every_steps: ``CKPT_KEEP_EVERY_STEPS``: steps divisible by it are never deleted; ``None``: no such steps.
        protected: Reasons why some must stay, by name.
        line: Their present training line; ``None``: it is derived here.

    Returns:
        The deletions, oldest step first, and the steps that are old enough but stay.
    """
    steps = sorted(committed, key=lambda commit: commit.step)
    on_line = {commit.name for commit in (present_line(steps) if line is None else line)}
    counted = [commit for commit in steps if commit.name in on_line and commit.name in whole]
    plan = StorePlan([], [])
    newest = {commit.name for commit in (*steps[-keep_newest:], *counted[-keep_newest:])}
    last = {commit.train_call: commit.name for commit in steps if commit.name in on_line}
    if last:
        last.pop(max(last))  # of the present call, the newest stay
    for commit in steps:
        if (reason := _why_retained(commit, newest, last, keep_newest, keep_every_steps)) is not None:
            plan.retained.append(Deletion(commit.name, reason))
            continue
        newer = [other for other in counted if other.step > commit.step]
        came_later = sum(_came_no_earlier(other, commit) for other in newer)
        if commit.name in protected:
            plan.kept.append(Deletion(commit.name, protected[commit.name]))
        elif came_later >= keep_newest:
            plan.deletions.append(
                Deletion(
                    commit.name, f"{keep_newest} newer are committed and were seen whole" if keep_newest > 1 else _ONE_NEWER
                )
            )
        else:
            plan.kept.append(Deletion(commit.name, _why_kept(commit, on_line, len(newer), keep_newest)))
    return plan


def _why_retained(
    commit: Committed, newest: Collection[str], last: Mapping[int, str], keep_newest: int, keep_every_steps: int | None
) -> str | None:
    if commit.name in newest:
        return f"one of the {keep_newest} newest" if keep_newest > 1 else "the newest"
    if _stays_for_ever(commit.step, keep_every_steps):
        return f"a multiple of {keep_every_steps} steps"
    if last.get(commit.train_call) == commit.name:
        return f"the last of train() call {commit.train_call}, with which a new pod begins"
    return None


def _why_kept(commit: Committed, line: Collection[str], newer: int, keep_newest: int) -> str:
    if newer >= keep_newest:
        return "it was committed later than higher steps: it stays until further ones are committed"
    left = "" if commit.name in line else "a lower step was committed later, so the run went back; "
    return f"{left}{newer} of {keep_newest} higher steps of the present line were seen whole"


def _came_no_earlier(commit: Committed, other: Committed) -> bool:
    is_earlier = "" < commit.modified < other.modified
    return commit.seen_s >= other.seen_s and not is_earlier


def _stays_for_ever(step: int, keep_every_steps: int | None) -> bool:
    return bool(keep_every_steps and step % keep_every_steps == 0)
