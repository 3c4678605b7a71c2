"""The queue once the pod is going: what is left is measured, the plan is made of it, and what does not go first is held."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sidecar.catalog.catalog import Tracked
from sidecar.catalog.events import Events, rounded
from sidecar.core.lifecycle.save_profile import SaveProfile
from sidecar.core.schedule.flush import Costs, Load, Outcome, Plan, plan_flush
from sidecar.core.schedule.order import Waiting
from sidecar.lifecycle.pod import PodState
from sidecar.transfer.executor import StoreExecutor
from sidecar.transfer.rate_gate import PauseGate
from sidecar.upload.send.file_transfer import FileTransfer

PLAN_S = 0.2
"""How often the plan is made again when nothing but the time has changed."""
ROUND_TRIP_S = 0.05
"""What a request takes beside its bytes, where it was not measured."""
COMMIT_ROUND_TRIPS = 6
"""Joining parts, the manifest, reading it with those of others, the listing, the commit."""
HOLD_S = 0.25
"""What is under way and ends within this time is not held."""
PLACES = 4
"""Requests that are enough for the first to have the link."""
LEAST_READY_S = 0.2
"""A save that takes longer than the ones before is expected to end at any moment."""


@dataclass(frozen=True, slots=True)
class FlushBudget:
    """How much time is left, and what it has to be enough for."""

    left_s: float
    newest_durable_step: int | None
    usual: SaveProfile | None
    """What the latest save was like."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A finished checkpoint that is not durable."""

    tracked: Tracked
    place: Waiting
    transfer: FileTransfer | None
    """``None`` before and after there is something to send."""
    is_sent: bool


@dataclass(frozen=True, slots=True)
class Writing:
    """A checkpoint that the trainer still writes."""

    place: Waiting
    transfer: FileTransfer | None
    seen_bytes: int
    """Of files that can be sent."""
    age_s: float


class UnfinishedCheckpoints(Protocol):
    """Checkpoints that the trainer still writes."""

    def writing(self, *, alive: bool) -> list[Writing]:
        """Return those that the trainer is likely to finish. ``alive``: a training process is running."""
        ...

    def sendings(self) -> list[tuple[Waiting, FileTransfer]]:
        """Return those of which files are being sent, with their place in the queue."""
        ...


class FlushControl:
    """Used from the event loop only. ``plan`` is ``None`` as long as the pod stays."""

    def __init__(self, executor: StoreExecutor, events: Events) -> None:
        self.plan: Plan | None = None
        self._executor = executor
        self._events = events
        self._turnstiles: dict[str, _Counted] = {}
        self._planned: tuple[frozenset[object], float] = (frozenset(), 0.0)

    def pause_gate(self, name: str) -> PauseGate:
        """Return what the bytes of a checkpoint pass through."""
        return self._counted(name).pause_gate

    def arrived(self, name: str, size_bytes: int) -> None:
        """Take note of so many bytes of a checkpoint that the store has confirmed."""
        self._counted(name).arrived_bytes += size_bytes

    def stay(self) -> None:
        """The pod stays: there is no plan, and nothing is held."""
        if self.plan is not None:
            self.plan, self._planned = None, (frozenset(), 0.0)
            self.hold([])

    def decide(self, going: FlushBudget, pending: Sequence[Pending], early: UnfinishedCheckpoints, pod: PodState) -> None:
        """Make the plan, if it is time to.

        Args:
            going: How much time is left, and for what.
            pending: What is finished and not all sent.
            early: What is not finished, and what of it is being sent.
            pod: Asked whether the trainer is alive.
        """
        sent_early = (place.name for place, _ in early.sendings())
        what = frozenset([*((each.place.name, each.place.refused, each.is_sent) for each in pending), *sent_early])
        if self.plan is not None and what == self._planned[0] and time.monotonic() - self._planned[1] < PLAN_S:
            return
        before, self._planned = self.plan, (what, time.monotonic())
        self.plan = plan_flush(
            # What is finished counts, also while its directory is being written anew.
            [
                *(self._expected(each, going.usual) for each in early.writing(alive=pod.trainer_alive())),
                *map(self._load, pending),
            ],
            rate=self._executor.rate(),
            left_s=going.left_s,
            newest_durable_step=going.newest_durable_step,
            costs=Costs(ROUND_TRIP_S / self._executor.most, COMMIT_ROUND_TRIPS * ROUND_TRIP_S),
        )
        if _outcome(self.plan) != (_outcome(before) if before is not None else []):
            self._announce(self.plan, going.left_s)

    def _announce(self, plan: Plan, left_s: float) -> None:
        self._events.happened(
            "flush_planned",
            level="warning" if any(p.verdict is Outcome.NO_TIME for p in plan.order) else "info",
            order={p.name: p.verdict.value for p in plan.order},
            left_s=rounded(left_s),
            why={p.name: p.reason for p in plan.order if p.reason},
        )

    def hold(self, ordered: Sequence[FileTransfer], *, next_up: str | None = None) -> None:
        """Hold what does not go first, in the middle of its requests, while the first is not through.

        What is under way may take longer than all that is left of the time; where it ends at once, it is let end. As many
        requests are let through as the first needs places.

        Args:
            ordered: What is being sent; the first goes first.
            next_up: A checkpoint that has nothing to send this moment and goes on in the next.
        """
        first = ordered[0] if ordered else None
        if self.plan is not None and next_up is not None:
            self._hold_behind(self.plan, next_up, places={}, missing=0)
            return
        if self.plan is None or first is None or not first.in_flight or not self._is_worth_holding(ordered[1:]):
            for counted in self._turnstiles.values():
                counted.pause_gate.hold(False)
            return
        free = self._executor.most - sum(transfer.places for transfer in ordered[1:])
        missing = max(0, min(self._executor.adapted.limit, PLACES) - free) if first.has_more else 0
        places = {transfer.name: transfer.in_flight for transfer in ordered[1:]}
        self._hold_behind(self.plan, first.name, places=places, missing=missing)

    def _hold_behind(self, plan: Plan, first: str, *, places: Mapping[str, int], missing: int) -> None:
        rank = plan.rank()
        for name, counted in self._turnstiles.items():
            # What is planned before it is being prepared; only what comes behind is held.
            is_behind = name != first and rank.get(name, len(rank)) >= rank.get(first, len(rank))
            but = min(missing, places.get(name, 0)) if is_behind else 0
            counted.pause_gate.hold(is_behind, exempt=but)
            missing -= but

    def forget(self, names: Iterable[str]) -> None:
        """Keep count only of these."""
        kept = set(names)
        for name in [name for name in self._turnstiles if name not in kept]:
            self._turnstiles.pop(name).pause_gate.hold(False)

    def why(self, name: str) -> str:
        """Return why a checkpoint does not go first, in words that do not change all the time."""
        planned = self.plan.get(name) if self.plan is not None else None
        if self.plan is None or planned is None or planned.verdict is Outcome.FITS or planned.done_in_s is None:
            return "a newer checkpoint goes first"
        first = self.plan.order[0].name
        return (
            f"there is no time for it before the deadline; {first} goes first" if first != name else "there is too little time"
        )

    def _counted(self, name: str) -> _Counted:
        return self._turnstiles.setdefault(name, _Counted(PauseGate(self._executor.gate)))

    def _is_worth_holding(self, behind: Sequence[FileTransfer]) -> bool:
        if self._is_holding:
            return True
        rate, to_come = self._executor.rate(), sum(map(self._to_come_bytes, behind))
        return rate is None or to_come > HOLD_S * rate.expected

    @property
    def _is_holding(self) -> bool:
        return any(counted.pause_gate.is_held for counted in self._turnstiles.values())

    def _to_come_bytes(self, transfer: FileTransfer) -> int:
        """Return at most how many bytes of requests under way have not left."""
        begun_bytes = sum(item.size_bytes for item in transfer.large_in_flight)
        return max(0, begun_bytes - self._counted(transfer.name).under_way_bytes(transfer))

    def _load(self, pending: Pending) -> Load:
        tracked, transfer = pending.tracked, pending.transfer
        size_bytes = tracked.checkpoint.size_bytes if tracked.checkpoint else 0
        sent_bytes = size_bytes if pending.is_sent else tracked.sent_bytes if transfer is None else transfer.sent_bytes()
        left_bytes = max(0, size_bytes - sent_bytes - self._under_way_bytes(tracked.name, transfer))
        files = len(tracked.checkpoint.files) if tracked.checkpoint else 0
        requests = files * left_bytes // max(1, size_bytes) + left_bytes // self._executor.part_bytes(
            size_bytes // max(1, files)
        )
        return Load(pending.place, left_bytes, requests)

    def _expected(self, writing: Writing, usual: SaveProfile | None) -> Load:
        sent_bytes = 0 if writing.transfer is None else writing.transfer.sent_bytes()
        sent_bytes += self._under_way_bytes(writing.place.name, writing.transfer)
        size_bytes = max(writing.seen_bytes, usual.size_bytes if usual else 0)
        save_s = usual.took_s if usual and usual.took_s is not None else 0.0
        return Load(
            writing.place,
            max(0, size_bytes - sent_bytes),
            max(0, size_bytes - sent_bytes) // self._executor.part_bytes(0),
            closed_bytes=max(0, writing.seen_bytes - sent_bytes),
            ready_in_s=max(LEAST_READY_S, save_s - writing.age_s),
        )

    def _under_way_bytes(self, name: str, transfer: FileTransfer | None) -> int:
        return 0 if transfer is None else self._counted(name).under_way_bytes(transfer)


@dataclass(slots=True)
class _Counted:
    pause_gate: PauseGate
    arrived_bytes: int = 0

    def under_way_bytes(self, transfer: FileTransfer) -> int:
        """Return what left of requests that have not ended; nothing of what was sent in vain is counted for long."""
        if not transfer.in_flight:
            self.pause_gate.passed_bytes = self.arrived_bytes = 0
        return max(0, self.pause_gate.passed_bytes - self.arrived_bytes)


def _outcome(plan: Plan) -> list[tuple[str, Outcome]]:
    return [(planned.name, planned.verdict) for planned in plan.order]
