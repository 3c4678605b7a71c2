"""Flush control: after a termination notice it plans the order of uploads and pauses those of lower priority."""

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
from sidecar.lifecycle.pod import UploadingPod
from sidecar.transfer.executor import StoreExecutor
from sidecar.transfer.rate_gate import PauseGate
from sidecar.upload.send.file_transfer import FileTransfer

REPLAN_S = 0.2
"""Interval in seconds at which the plan is computed again if nothing but the time has changed."""
ROUND_TRIP_S = 0.05
"""Assumed seconds of a request without its bytes, if no round trip was measured."""
COMMIT_ROUND_TRIPS = 6
"""Requests from the last part to the commit: completion, manifest, its listing and reading, listing of objects, commit."""
LEAST_PAUSED_S = 0.25
"""Requests in flight that end within this time, in seconds, are not paused."""
REQUESTS_FOR_LINK = 4
"""Number of requests that suffice for one upload to use the whole link."""
LEAST_READY_S = 0.2
"""Minimum expected rest of a save in seconds: a save that takes longer than the ones before may end at any time."""


@dataclass(frozen=True, slots=True)
class FlushBudget:
    """Time left for the flush, and the state that a run would resume from without it."""

    left_s: float
    newest_durable_step: int | None
    usual: SaveProfile | None
    """Profile of the latest save; ``None``: there was none."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A finished checkpoint that is not durable."""

    tracked: Tracked
    waiting: Waiting
    transfer: FileTransfer | None
    """``None`` while there is nothing to send: before the start, and after the last part."""
    is_sent: bool


@dataclass(frozen=True, slots=True)
class Writing:
    """A checkpoint that the trainer still writes."""

    waiting: Waiting
    transfer: FileTransfer | None
    seen_bytes: int
    """Size of the files that can be sent now."""
    age_s: float


class UnfinishedCheckpoints(Protocol):
    """Checkpoints that the trainer still writes."""

    def writing(self, *, alive: bool) -> list[Writing]:
        """Return the checkpoints that the trainer is likely to finish. ``alive``: a training process is running."""
        ...

    def transfers(self) -> list[tuple[Waiting, FileTransfer]]:
        """Return the transfers of checkpoints with an early upload, each with what its upload order depends on."""
        ...


class FlushControl:
    """Plan of the flush, and its pause gates. Used from the event loop only.

    ``plan`` is ``None`` without a termination notice.
    """

    def __init__(self, executor: StoreExecutor, events: Events) -> None:
        self.plan: Plan | None = None
        self._executor = executor
        self._events = events
        self._gates: dict[str, _Counted] = {}
        self._planned: tuple[frozenset[object], float] = (frozenset(), 0.0)

    def pause_gate(self, name: str) -> PauseGate:
        """Return the gate that the bytes of a checkpoint pass through."""
        return self._counted(name).pause_gate

    def arrived(self, name: str, size_bytes: int) -> None:
        """Record ``size_bytes`` of a checkpoint that the store has confirmed."""
        self._counted(name).arrived_bytes += size_bytes

    def drop_plan(self) -> None:
        """Drop the plan and release all gates: there is no termination notice, or it was withdrawn."""
        if self.plan is not None:
            self.plan, self._planned = None, (frozenset(), 0.0)
            self.pause_behind_first([])

    def decide(self, budget: FlushBudget, pending: Sequence[Pending], early: UnfinishedCheckpoints, pod: UploadingPod) -> None:
        """Compute the plan again if its inputs changed, or ``REPLAN_S`` has passed.

        Args:
            budget: Time left, and the newest durable step.
            pending: Finished checkpoints that are not durable.
            early: Unfinished checkpoints with their early uploads.
            pod: State of the pod: whether the trainer is alive.
        """
        sent_early = (waiting.name for waiting, _ in early.transfers())
        what = frozenset([*((each.waiting.name, each.waiting.refused, each.is_sent) for each in pending), *sent_early])
        if self.plan is not None and what == self._planned[0] and time.monotonic() - self._planned[1] < REPLAN_S:
            return
        before, self._planned = self.plan, (what, time.monotonic())
        self.plan = plan_flush(
            # Of equal names the last counts: the finished one, also while its directory is being rewritten.
            [
                *(self._expected(each, budget.usual) for each in early.writing(alive=pod.trainer_alive())),
                *map(self._load, pending),
            ],
            rate=self._executor.rate(),
            left_s=budget.left_s,
            newest_durable_step=budget.newest_durable_step,
            costs=Costs(ROUND_TRIP_S / self._executor.most, COMMIT_ROUND_TRIPS * ROUND_TRIP_S),
        )
        if _outcome(self.plan) != (_outcome(before) if before is not None else []):
            self._announce(self.plan, budget.left_s)

    def _announce(self, plan: Plan, left_s: float) -> None:
        self._events.happened(
            "flush_planned",
            level="warning" if any(p.verdict is Outcome.NO_TIME for p in plan.order) else "info",
            order={p.name: p.verdict.value for p in plan.order},
            left_s=rounded(left_s),
            why={p.name: p.reason for p in plan.order if p.reason},
        )

    def pause_behind_first(self, ordered: Sequence[FileTransfer], *, next_up: str | None = None) -> None:
        """Pause the transfers behind the first one, in the middle of their requests, until the first one is sent.

        Their requests in flight might otherwise take all of the time left. Requests that end soon are not paused. Some are
        exempt if the first transfer needs their slots.

        Args:
            ordered: All transfers, in the order of the plan.
            next_up: A checkpoint that is being handed over: it has nothing to send now, and continues at once.
        """
        first = ordered[0] if ordered else None
        if self.plan is not None and next_up is not None:
            self._pause_behind(self.plan, next_up, in_flight={}, missing=0)
            return
        if self.plan is None or first is None or not first.in_flight or not self._is_worth_pausing(ordered[1:]):
            for counted in self._gates.values():
                counted.pause_gate.set_paused(False)
            return
        free = self._executor.most - sum(transfer.slots for transfer in ordered[1:])
        missing = max(0, min(self._executor.adapted.limit, REQUESTS_FOR_LINK) - free) if first.has_more else 0
        in_flight = {transfer.name: transfer.in_flight for transfer in ordered[1:]}
        self._pause_behind(self.plan, first.name, in_flight=in_flight, missing=missing)

    def _pause_behind(self, plan: Plan, first: str, *, in_flight: Mapping[str, int], missing: int) -> None:
        rank = plan.rank()
        for name, counted in self._gates.items():
            # Transfers planned before it are being prepared; only those behind it are paused.
            is_behind = name != first and rank.get(name, len(rank)) >= rank.get(first, len(rank))
            but = min(missing, in_flight.get(name, 0)) if is_behind else 0
            counted.pause_gate.set_paused(is_behind, exempt=but)
            missing -= but

    def forget(self, names: Iterable[str]) -> None:
        """Drop the gates of all other checkpoints."""
        kept = set(names)
        for name in [name for name in self._gates if name not in kept]:
            self._gates.pop(name).pause_gate.set_paused(False)

    def why(self, name: str) -> str:
        """Return why a checkpoint is not sent first. The text has no numbers, so that the status changes rarely."""
        planned = self.plan.get(name) if self.plan is not None else None
        if self.plan is None or planned is None or planned.verdict is Outcome.FITS or planned.done_in_s is None:
            return "a newer checkpoint goes first"
        first = self.plan.order[0].name
        return (
            f"there is no time for it before the deadline; {first} goes first" if first != name else "there is too little time"
        )

    def _counted(self, name: str) -> _Counted:
        return self._gates.setdefault(name, _Counted(PauseGate(self._executor.gate)))

    def _is_worth_pausing(self, behind: Sequence[FileTransfer]) -> bool:
        if self._is_pausing:
            return True
        rate, to_come = self._executor.rate(), sum(map(self._unsent_bytes, behind))
        return rate is None or to_come > LEAST_PAUSED_S * rate.expected

    @property
    def _is_pausing(self) -> bool:
        return any(counted.pause_gate.is_paused for counted in self._gates.values())

    def _unsent_bytes(self, transfer: FileTransfer) -> int:
        """Return an upper bound of the bytes of requests in flight that are not sent yet."""
        begun_bytes = sum(item.size_bytes for item in transfer.large_in_flight)
        return max(0, begun_bytes - self._counted(transfer.name).on_wire_bytes(transfer))

    def _load(self, pending: Pending) -> Load:
        tracked, transfer, size_bytes = pending.tracked, pending.transfer, pending.tracked.size_bytes
        sent_bytes = size_bytes if pending.is_sent else tracked.sent_bytes if transfer is None else transfer.sent_bytes()
        left_bytes = max(0, size_bytes - sent_bytes - self._on_wire_bytes(tracked.name, transfer))
        files = len(tracked.checkpoint.files) if tracked.checkpoint else 0
        requests = files * left_bytes // max(1, size_bytes) + left_bytes // self._executor.part_bytes(
            size_bytes // max(1, files)
        )
        return Load(pending.waiting, left_bytes, requests)

    def _expected(self, writing: Writing, usual: SaveProfile | None) -> Load:
        sent_bytes = 0 if writing.transfer is None else writing.transfer.sent_bytes()
        sent_bytes += self._on_wire_bytes(writing.waiting.name, writing.transfer)
        size_bytes = max(writing.seen_bytes, usual.size_bytes if usual else 0)
        save_s = usual.took_s if usual and usual.took_s is not None else 0.0
        return Load(
            writing.waiting,
            max(0, size_bytes - sent_bytes),
            max(0, size_bytes - sent_bytes) // self._executor.part_bytes(0),
            closed_bytes=max(0, writing.seen_bytes - sent_bytes),
            ready_in_s=max(LEAST_READY_S, save_s - writing.age_s),
        )

    def _on_wire_bytes(self, name: str, transfer: FileTransfer | None) -> int:
        return 0 if transfer is None else self._counted(name).on_wire_bytes(transfer)


@dataclass(slots=True)
class _Counted:
    pause_gate: PauseGate
    arrived_bytes: int = 0

    def on_wire_bytes(self, transfer: FileTransfer) -> int:
        """Return the bytes sent but not confirmed. Bytes of failed requests are dropped once no request is in flight."""
        if not transfer.in_flight:
            self.pause_gate.passed_bytes = self.arrived_bytes = 0
        return max(0, self.pause_gate.passed_bytes - self.arrived_bytes)


def _outcome(plan: Plan) -> list[tuple[str, Outcome]]:
    return [(planned.name, planned.verdict) for planned in plan.order]
