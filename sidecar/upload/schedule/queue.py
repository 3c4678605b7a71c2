"""Queue of uploads. After each change it is ordered again: by the upload order, or by the plan of a flush."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from operator import itemgetter

from sidecar.catalog.catalog import Catalog, Tracked
from sidecar.core.lifecycle.save_profile import usual_profile
from sidecar.core.lifecycle.states import State
from sidecar.core.schedule.order import Rank, Waiting, overtakes, rank, send_order
from sidecar.lifecycle.deadline import Deadline
from sidecar.lifecycle.pod import UploadingPod
from sidecar.upload.early.early_upload import EarlyUploads
from sidecar.upload.schedule.flush_control import FlushBudget, FlushControl, Pending
from sidecar.upload.send.file_transfer import FileTransfer


@dataclass(slots=True, eq=False)
class Active:
    """An upload in progress. ``transfer`` is ``None`` while there is nothing to send."""

    tracked: Tracked
    transfer: FileTransfer | None = None
    is_sent: bool = False
    """Only manifest and commit are left."""
    is_handed_over: bool = False
    """Its early upload is being taken over: it continues to send at once."""
    is_deferred: bool = False
    """It may not be sent yet: other uploads have priority."""

    @property
    def is_preparing(self) -> bool:
        """Whether it has nothing to send yet, and will in a moment."""
        return self.transfer is None and not self.is_sent and not self.is_deferred

    @property
    def is_ending(self) -> bool:
        """Whether only answers, manifest and commit are left: every work item was started, and every large part was sent."""
        return self.is_sent or (self.transfer is not None and self.transfer.is_ending and not self.transfer.large_sending)


EndingUpload = tuple[Rank, str]
"""An upload that is ending: its place in the upload order, and the name of the checkpoint."""


class Wake:
    """Wakes all uploads that wait for commits of higher priority.

    The first upload that runs after the waking determines which upload commits next; the others reuse the result. Without
    that, hundreds of uploads would each compare all others.
    """

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self._first: tuple[EndingUpload | None] | None = None

    def first_of_ending(self, find: Callable[[], EndingUpload | None]) -> EndingUpload | None:
        """Return the result of the first call's ``find``."""
        if self._first is None:
            self._first = (find(),)
        return self._first[0]


class Queue:
    """Uploads in progress, and those that wait for their turn."""

    def __init__(self, catalog: Catalog, early: EarlyUploads, flush: FlushControl) -> None:
        self.active: dict[str, Active] = {}
        """Uploads in progress, by checkpoint."""
        self.committing: str | None = None
        """Name of the checkpoint whose commit is being tried again, after its upload has ended."""
        self._catalog = catalog
        self._early = early
        self._flush = flush
        self._first: str | None = None
        """Name of the upload that has the link until another one may preempt it."""
        self._wake = self._woken = Wake()
        """The next waking, and the latest."""
        self._awaited: set[str] = set()
        """Uploads that others wait for. They wait for none, so that commits keep coming."""

    def plan(self, deadline: Deadline, pod: UploadingPod) -> None:
        """Plan the flush, if there is a termination notice."""
        left_s = deadline.left_s()
        if left_s is None:
            self._flush.drop_plan()
            return
        usual = usual_profile(t.checkpoint for t in self._catalog.all() if t.checkpoint)
        pending = []
        for tracked in self._catalog.pending():
            if tracked.state is not State.UPLOADED:
                active = self.active.get(tracked.name) or Active(tracked)
                pending.append(Pending(tracked, self._waiting(tracked), active.transfer, active.is_sent))
        budget = FlushBudget(left_s, self._catalog.newest_durable_step, usual)
        self._flush.decide(budget, pending, self._early, pod)

    def begin(self) -> list[Active]:
        """Start the uploads whose turn it is, and return them."""
        queue, begun = self._pending(), []
        self._let_first_through(queue)
        for tracked in queue:
            if tracked.name not in self.active:
                self.active[tracked.name] = Active(tracked)
                begun.append(self.active[tracked.name])
            active = self.active[tracked.name]
            if active.tracked is not tracked or (active.transfer is None and not active.is_sent):
                break  # the next one starts when this one has no work items left
            if active.transfer is not None and active.transfer.has_more and not active.transfer.retry_gate.refused:
                break
        return begun

    def transfers(self) -> dict[str, FileTransfer]:
        """Return all transfers by checkpoint, early uploads included."""
        early = {waiting.name: transfer for waiting, transfer in self._early.transfers()}
        return early | {a.tracked.name: a.transfer for a in self.active.values() if a.transfer is not None}

    def decide_anew(self) -> None:
        """Forget whose turn it was: the store was away, and checkpoints have come meanwhile."""
        self._first = None
        for tracked in self._catalog.pending():
            tracked.overtook = False

    def in_order(self) -> list[FileTransfer]:
        """Return all transfers in sending order, and record in the catalog which ones are paused."""
        transfers = self.transfers()
        self._flush.forget([*transfers, *self.active])
        behind = self._behind_preparing()
        ordered = [t for t in self._sorted(transfers) if t.in_flight or t.name not in behind]
        if (next_up := self.handed_over()) is not None and self._flush.plan is not None:
            rank_of = self._flush.plan.rank()
            ordered = [t for t in ordered if rank_of.get(t.name, len(rank_of)) <= rank_of.get(next_up, -1)]
        for position, transfer in enumerate(ordered):
            self._report_turn(transfer, is_first=position == 0 or not ordered[0].has_more)
        return ordered

    def _behind_preparing(self) -> set[str]:
        """Return the uploads behind one that is preparing: after an outage all do, and the newest one is sent first."""
        preparing = {name for name, active in self.active.items() if active.is_preparing}
        if not preparing:
            return set()
        queue = [tracked.name for tracked in self._pending()]
        first = next((at for at, name in enumerate(queue) if name in preparing), len(queue))
        return set(queue[first + 1 :])

    def handed_over(self) -> str | None:
        """Return the name of a checkpoint whose early upload is being taken over; ``None``: there is none."""
        return next((name for name, active in self.active.items() if active.is_handed_over), None)

    def has_ending_ahead(self, tracked: Tracked, wake: Wake | None = None) -> bool:
        """Whether this upload has to wait for the commit of an ending upload of higher priority. Records that one as awaited.

        An awaited upload does not wait itself. Otherwise, if saves come faster than the link takes them, each upload would wait
        for the next, and none would be committed.

        Args:
            tracked: The checkpoint of this upload.
            wake: The latest result of ``upload_ended``; ``None``: this upload has not waited yet.
        """
        # Only the result of the latest waking is reused: an upload that an earlier one found may have ended since.
        first = self._first_of_ending() if wake is not self._woken else self._woken.first_of_ending(self._first_of_ending)
        own = self._waiting(tracked)
        if first is None or first[0] <= rank(own) or (tracked.name in self._awaited and not own.refused):
            return False
        self._awaited.add(first[1])
        return True

    def _first_of_ending(self) -> EndingUpload | None:
        """Return the upload of the highest priority that is ending; ``None``: there is none."""
        return max((self._as_ending(active) for active in self.active.values() if active.is_ending), default=None)

    def _as_ending(self, active: Active) -> EndingUpload:
        return rank(self._waiting(active.tracked)), active.tracked.name

    def end(self, active: Active) -> None:
        """Remove an upload that has ended, with any outcome."""
        del self.active[active.tracked.name]
        self._awaited.discard(active.tracked.name)
        self.wake_waiting()

    def wake_waiting(self) -> None:
        """Wake the uploads that wait in ``upload_ended``."""
        self._woken = self._wake
        self._woken.event.set()
        self._wake = Wake()

    async def upload_ended(self) -> Wake:
        """Wait until an upload has ended or backs off, or there is a termination notice."""
        wake = self._wake
        await wake.event.wait()
        return wake

    def waits_for_others(self, tracked: Tracked) -> bool:
        """Whether this node's part of a checkpoint is in the store, and other nodes' parts are awaited."""
        return tracked.state is State.UPLOADED and tracked.name not in self.active

    def _pending(self) -> list[Tracked]:
        waiting = {t.name: t for t in self._catalog.pending() if t.state is not State.UPLOADED}
        if self._flush.plan is not None:
            rank_of = self._flush.plan.rank()
            return sorted(waiting.values(), key=lambda t: rank_of.get(t.name, len(rank_of)))
        return [waiting[w.name] for w in self._send_order(map(self._waiting, waiting.values()))]

    def _send_order(self, waiting: Iterable[Waiting]) -> list[Waiting]:
        found = list(waiting)
        newest_sent = self._newest_sent() if any(waiting.shared for waiting in found) else None
        return send_order(found, running=self._first, newest_sent=newest_sent)

    def _newest_sent(self) -> int | None:
        """Return the newest step of the latest attempt of which this node's part is in the store."""
        known = [(t.marked_at_s, t.checkpoint, t.state) for t in self._catalog.all() if t.checkpoint is not None]
        if not known:
            return None
        _, latest, _ = max(known, key=itemgetter(0))
        sent = [c for _, c, state in known if state in (State.UPLOADED, State.COMMITTED) and c.attempt == latest.attempt]
        return max((c.resume_step for c in sent if c.resume_step is not None), default=None)

    def _waiting(self, tracked: Tracked) -> Waiting:
        active = self.active.get(tracked.name)
        refused = active is not None and active.transfer is not None and active.transfer.retry_gate.refused
        waiting = tracked.waiting
        refused = refused or (active is not None and active.is_deferred)
        return replace(waiting, refused=refused, begun=active is not None and active.transfer is not None)

    def _let_first_through(self, queue: list[Tracked]) -> None:
        first = queue[0].name if queue else None
        if first == self._first:
            return
        before = self.active.get(self._first) if self._first else None
        self._first = first
        has_more = before is not None and before.transfer is not None and before.transfer.has_more
        if first and before is not None and has_more and self._flush.plan is None:
            queue[0].overtook = overtakes(queue[0].waiting, before.tracked.waiting)
            before.tracked.overtook = False

    def _sorted(self, transfers: dict[str, FileTransfer]) -> list[FileTransfer]:
        if self._flush.plan is not None:
            rank_of = self._flush.plan.rank()
            return [transfers[name] for name in sorted(transfers, key=lambda name: rank_of.get(name, len(rank_of)))]
        finished = [self._waiting(a.tracked) for a in self.active.values() if a.transfer is not None]
        unfinished = [waiting for waiting, transfer in self._early.transfers() if transfers[waiting.name] is transfer]
        return [transfers[waiting.name] for waiting in self._send_order([*finished, *unfinished])]

    def _report_turn(self, transfer: FileTransfer, *, is_first: bool) -> None:
        active = self.active.get(transfer.name)
        if active is None or active.transfer is not transfer:
            return
        if is_first and active.tracked.state is State.PAUSED:
            report_uploading(self._catalog, active.tracked, transfer)
        elif not is_first and active.tracked.state in (State.UPLOADING, State.PAUSED) and transfer.has_more:
            self._catalog.move(active.tracked, State.PAUSED, reason=self._flush.why(active.tracked.name))


def report_uploading(catalog: Catalog, tracked: Tracked, transfer: FileTransfer) -> None:
    """Record that a checkpoint is being sent, with the bytes that were sent before."""
    already_sent_bytes = tracked.set_sent_bytes(transfer.sent_bytes())
    catalog.move(tracked, State.UPLOADING, size_bytes=tracked.size_bytes, already_sent_bytes=already_sent_bytes)
