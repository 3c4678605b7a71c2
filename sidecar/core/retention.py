"""Which checkpoints are deleted, on the volume and in the store, and why. Plans only: the cleaner carries them out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kept:
    """A committed checkpoint that could be deleted. ``step`` ``None`` (``final``) is never deleted."""

    name: str
    step: int | None
    size_bytes: int = 0
    protected: str | None = None
    """Why it must stay: being resumed, the script's own, …"""


@dataclass(frozen=True, slots=True)
class Deletion:
    """One entry of a plan."""

    name: str
    reason: str


def plan_local_deletion(
    durable: Iterable[Kept], *, keep_newest: int, free_bytes: int, min_free_bytes: int, keep_least: int = 1
) -> list[Deletion]:
    """Return which durable local directories go: all but the ``keep_newest`` newest, and all but one when space is short.

    Args:
        durable: Committed checkpoints on the volume.
        keep_newest: At least 1.
        free_bytes: Free space of the volume now.
        min_free_bytes: The disk guard, ``CKPT_MIN_FREE``, or what the next checkpoint needs.
        keep_least: How many of the newest stay even then. 0: the next checkpoint is worth more than a local copy.
    """
    steps = sorted((c for c in durable if c.step is not None), key=_step, reverse=True)
    plan = [Deletion(c.name, f"durable, and {keep_newest} newer kept") for c in steps[keep_newest:] if c.protected is None]
    missing = min_free_bytes - free_bytes - sum(c.size_bytes for c in steps[keep_newest:] if c.protected is None)
    for checkpoint in reversed(steps[keep_least:keep_newest]):
        if missing <= 0:
            break
        if checkpoint.protected is None:
            plan.append(Deletion(checkpoint.name, f"durable, and less than {min_free_bytes} bytes are free"))
            missing -= checkpoint.size_bytes
    return plan


def plan_store_deletion(committed: Iterable[Kept], *, keep_newest: int | None, keep_every_steps: int | None) -> list[Deletion]:
    """Return which committed checkpoints go from the store.

    Args:
        committed: All committed steps of the run.
        keep_newest: ``CKPT_KEEP_STORE``; ``None`` keeps everything.
        keep_every_steps: ``CKPT_KEEP_EVERY_STEPS``: steps divisible by it stay for ever.

    Returns:
        Oldest first. Never the newest one, nor one that is protected (I7).
    """
    if keep_newest is None:
        return []
    steps = sorted((c for c in committed if c.step is not None), key=_step, reverse=True)
    return [
        Deletion(c.name, f"{keep_newest} newer are committed")
        for c in reversed(steps[max(1, keep_newest) :])
        if c.protected is None and not (keep_every_steps and _step(c) % keep_every_steps == 0)
    ]


def _step(checkpoint: Kept) -> int:
    return -1 if checkpoint.step is None else checkpoint.step
