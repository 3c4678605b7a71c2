"""Upload order: newest first, yet commits keep coming (DESIGN)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

BESIDE_S = 0.2
"""Seconds before the last byte of an upload from which the next one is sent beside it, so that the link does not idle."""
LEAST_USED = 0.5
"""Minimum share of the link that requests in flight use if they are as fast as it allows."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A finished checkpoint that is not durable. ``step`` ``None`` is ``final`` without a step: newer than any."""

    name: str
    step: int | None
    urgent: bool
    overtook: bool = False
    """Its upload preempted another one."""
    written: bool = True
    """False: the trainer still writes it, and only closed files can be sent."""
    refused: bool = False
    """The store refused its latest request: other checkpoints go first."""


Rank = tuple[bool, bool, bool, bool, int]
"""Place in the upload order: the highest goes first."""


def rank(checkpoint: Waiting) -> Rank:
    """Return the place of a checkpoint in the upload order."""
    # A finished checkpoint precedes one that may never be finished.
    step = checkpoint.step
    return not checkpoint.refused, checkpoint.urgent, checkpoint.written, step is None, step or 0


def upload_order(waiting: Iterable[Waiting]) -> list[Waiting]:
    """Return the checkpoints in upload order: ``jit`` and ``final`` before periodic ones, then newest step first."""
    return sorted(waiting, key=rank, reverse=True)


def overtakes(newer: Waiting, running: Waiting) -> bool:
    """Whether ``newer`` preempts the upload of ``running`` at its next part.

    A newer step does, unless ``running`` itself preempted another upload. So commits keep coming when the save interval is
    shorter than the upload time, and the newest committed step is at most two uploads old. ``jit`` and ``final`` preempt every
    periodic one, and everything preempts an upload that the store refuses.
    """
    if newer.refused != running.refused:
        return running.refused
    if newer.urgent != running.urgent:
        return newer.urgent
    return newer.written and rank(newer) > rank(running) and not running.overtook


def send_order(waiting: Iterable[Waiting], *, running: str | None) -> list[Waiting]:
    """Return the upload order. ``running``, by name, stays first unless another one preempts it."""
    order = upload_order(waiting)
    now = next((c for c in order if c.name == running), None)
    if now is None or overtakes(order[0], now):
        return order
    return [now, *(c for c in order if c is not now)]


def superseded(waiting: Iterable[Waiting], *, newest_committed_step: int | None) -> list[Waiting]:
    """Return the checkpoints that no resume needs any more, because a newer step is durable."""
    if newest_committed_step is None:
        return []
    return [c for c in waiting if c.step is not None and c.step < newest_committed_step]


def waits_for_last_parts(*, left_bytes: int, used_bytes_per_s: float | None, link_bytes_per_s: float | None) -> bool:
    """Whether large files wait until other uploads, whose last parts are in flight, are through.

    Those uploads would only be later beside others, and with saves more often than the link takes them, the more of them share
    it, the later is each. Where slow connections leave the link unused, nothing waits.

    Args:
        left_bytes: Bytes not sent yet of uploads that have no further part to start.
        used_bytes_per_s: Rate of all requests together in the latest seconds; ``None``: unknown.
        link_bytes_per_s: Capacity of the link; ``None``: unknown.
    """
    if used_bytes_per_s is None or link_bytes_per_s is None:
        return False
    return left_bytes > BESIDE_S * link_bytes_per_s and used_bytes_per_s >= LEAST_USED * link_bytes_per_s
