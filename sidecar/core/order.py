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
    written: bool = True
    """False: the trainer still writes it, and only the files that it has closed can be sent."""
    refused: bool = False
    """The store refuses what was sent of it last: something else may have more luck."""


def _rank(checkpoint: Waiting) -> tuple[bool, bool, bool, bool, int]:
    # What is finished is closer to being durable than what may never be finished.
    step = checkpoint.step
    return not checkpoint.refused, checkpoint.urgent, checkpoint.written, step is None, step or 0


def upload_order(waiting: Iterable[Waiting]) -> list[Waiting]:
    """Return what is to upload: ``jit`` and ``final`` before periodic ones, then newest step first."""
    return sorted(waiting, key=_rank, reverse=True)


def overtakes(newer: Waiting, running: Waiting) -> bool:
    """Whether ``newer`` pauses the upload of ``running`` at its next part.

    A newer step does, but an upload that itself overtook another is let through: under a save interval shorter than the
    upload time commits keep coming, and the newest committed step is at most two uploads old. ``jit`` and ``final``
    overtake every periodic one, and everything overtakes what the store refuses.
    """
    if newer.refused != running.refused:
        return running.refused
    if newer.urgent != running.urgent:
        return newer.urgent
    return newer.written and _rank(newer) > _rank(running) and not running.overtook


def send_order(waiting: Iterable[Waiting], *, running: str | None) -> list[Waiting]:
    """Return the upload order, in which ``running``, by name, stays first unless something may overtake it."""
    order = upload_order(waiting)
    now = next((c for c in order if c.name == running), None)
    if now is None or overtakes(order[0], now):
        return order
    return [now, *(c for c in order if c is not now)]


def superseded(waiting: Iterable[Waiting], *, newest_committed_step: int | None) -> list[Waiting]:
    """Return the checkpoints that a newer durable step has made unnecessary for resuming."""
    if newest_committed_step is None:
        return []
    return [c for c in waiting if c.step is not None and c.step < newest_committed_step]
