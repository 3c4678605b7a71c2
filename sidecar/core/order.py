"""What is uploaded next (DESIGN: newest first, and yet something always lands)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiting:
    """A finished checkpoint that is not durable. ``step`` ``None`` is ``final`` without a step: newer than any."""

    name: str
    step: int | None
    urgent: bool
    overtook: bool = False
    """Its upload began by pausing another one."""


def _rank(checkpoint: Waiting) -> tuple[bool, bool, int]:
    return checkpoint.urgent, checkpoint.step is None, checkpoint.step or 0


def upload_order(waiting: Iterable[Waiting]) -> list[Waiting]:
    """Return what is to upload: ``jit`` and ``final`` before periodic ones, then newest step first."""
    return sorted(waiting, key=_rank, reverse=True)


def overtakes(newer: Waiting, running: Waiting) -> bool:
    """Whether ``newer`` pauses the upload of ``running`` at its next part.

    A newer step does, but an upload that itself overtook another is let through: under a save interval shorter than the
    upload time commits keep coming, and the newest committed step is at most two uploads old. ``jit`` and ``final``
    overtake every periodic one.
    """
    if newer.urgent != running.urgent:
        return newer.urgent
    return _rank(newer) > _rank(running) and not running.overtook


def superseded(waiting: Iterable[Waiting], *, newest_committed_step: int | None) -> list[Waiting]:
    """Return the checkpoints that a newer durable step has made unnecessary for resuming."""
    if newest_committed_step is None:
        return []
    return [c for c in waiting if c.step is not None and c.step < newest_committed_step]
