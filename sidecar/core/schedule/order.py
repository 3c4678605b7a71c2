"""Upload order: newest first, yet commits keep coming."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

BESIDE_S = 0.2
"""Seconds before the last byte of an upload from which the next one is sent beside it, so that the link does not idle."""
LATEST = 8
"""Number of the newest checkpoints among which the nodes choose a common one. After an outage, older ones wait."""
LEAST_USED = 0.5
"""Minimum share of the link that last parts use if it is what limits them."""


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
    shared: bool = False
    """Other nodes have parts of it: it is durable once all nodes have sent theirs."""
    begun: bool = False
    """Its upload has begun."""


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
    periodic one, and everything preempts an upload that the store refuses. Otherwise nothing preempts a part of a checkpoint of
    several nodes: they would preempt different ones.
    """
    if newer.refused != running.refused:
        return running.refused
    if newer.urgent != running.urgent:
        return newer.urgent
    return newer.written and rank(newer) > rank(running) and not running.overtook and not running.shared


def send_order(waiting: Iterable[Waiting], *, running: str | None, newest_sent: int | None = None) -> list[Waiting]:
    """Return the upload order of one node. ``running``, by name, stays first unless another one preempts it.

    In a job of several nodes, the first of the others is the one that all nodes choose (``_chosen_by_all``).

    Args:
        waiting: The checkpoints.
        running: The upload that runs first, by name; ``None``: there is none.
        newest_sent: The newest step of which this node's part is in the store; ``None``: there is none.
    """
    order = upload_order(waiting)
    now = next((c for c in order if c.name == running), None)
    if now is None or overtakes(order[0], now):
        return _chosen_first(order, newest_sent)
    steps = [step for step in (now.step, newest_sent) if step is not None]
    return [now, *_chosen_first([c for c in order if c is not now], max(steps, default=None))]


def _chosen_first(order: list[Waiting], newest_sent: int | None) -> list[Waiting]:
    if not order or not order[0].shared or order[0].urgent:
        return order
    alike = [c for c in order if c.shared and rank(c)[:-1] == rank(order[0])[:-1]]
    chosen = _chosen_by_all([c for c in alike if newest_sent is None or (c.step or 0) > newest_sent][:LATEST])
    return order if chosen is None else [chosen, *(c for c in order if c is not chosen)]


def _chosen_by_all(latest: Iterable[Waiting]) -> Waiting | None:
    """Return the checkpoint that all nodes send next, among the newest unsent ones; ``None``: there is none.

    Nodes end their uploads at different times, so that the newest checkpoint differs between them. If saves come faster than
    the link takes them, no checkpoint would be sent by all nodes, and none would become durable. So a node goes on with the
    step whose upload it has begun, and otherwise chooses the step that is divisible by the highest power of two, as all nodes
    do that have this step among their candidates.
    """
    return max(latest, key=lambda c: (c.begun, _twos(c.step or 0), c.step or 0), default=None)


def _twos(step: int) -> int:
    """Return how often 2 divides a step; 0 counts as divided most often."""
    return (step & -step).bit_length() if step else 1 << 16


def superseded(waiting: Iterable[Waiting], *, newest_committed_step: int | None) -> list[Waiting]:
    """Return the checkpoints that no resume needs any more, because a newer step is durable."""
    if newest_committed_step is None:
        return []
    return [c for c in waiting if c.step is not None and c.step < newest_committed_step]


def waits_for_last_parts(*, left_bytes: int, bytes_per_s: float | None, link_bytes_per_s: float | None) -> bool:
    """Whether large files of an upload wait until other uploads, whose last parts are in flight, have ended.

    If they shared the link, both would end later; with frequent saves ever more uploads would share it, and each would take
    longer. If the connections of the last parts are slow and leave the link unused, nothing waits.

    Args:
        left_bytes: Bytes not sent yet of uploads that have no further part to start.
        bytes_per_s: Their rate; ``None``: not measured yet.
        link_bytes_per_s: Capacity of the link; ``None``: unknown.
    """
    if link_bytes_per_s is None or left_bytes <= BESIDE_S * link_bytes_per_s:
        return False
    return bytes_per_s is None or bytes_per_s >= LEAST_USED * link_bytes_per_s
