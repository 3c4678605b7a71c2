"""Which upload goes first. Decided anew whenever something changes: by the order of the queue, or by the plan of a flush."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from sidecar.catalog import Catalog, Tracked
from sidecar.core.order import Waiting, overtakes, send_order, upload_order
from sidecar.core.saving import usual_save
from sidecar.core.states import State
from sidecar.upload.early import EarlyUploads
from sidecar.upload.flushing import Flush, Going, Pending
from sidecar.upload.sending import Sending


@dataclass(slots=True, eq=False)
class Active:
    """An upload under way. ``sending`` is ``None`` before and after there is something to send."""

    tracked: Tracked
    sending: Sending | None = None
    is_sent: bool = False
    """Manifest and commit are what is left."""
    hands_over: bool = False
    """What was sent of it early is being taken over: its next bytes follow at once."""
    is_held: bool = False
    """It may not be sent yet: what else there is goes first."""

    @property
    def is_ending(self) -> bool:
        """Whether nothing is left to begin but manifest and commit."""
        return self.is_sent or (self.sending is not None and self.sending.is_ending)


class Queue:
    """The uploads under way, and those that wait for their turn."""

    def __init__(self, catalog: Catalog, early: EarlyUploads, flush: Flush) -> None:
        self.active: dict[str, Active] = {}
        """By checkpoint."""
        self._catalog = catalog
        self._early = early
        self._flush = flush
        self._first: str | None = None
        """Name of the upload that is let through before everything that may not overtake it."""

    def plan(self, left_s: float | None, *, trainer_alive: Callable[[], bool]) -> None:
        """While the pod is going the time that is left decides; ``None``: it is not."""
        if left_s is None:
            self._flush.stay()
            return
        usual = usual_save(t.checkpoint for t in self._catalog.all() if t.checkpoint)
        pending = []
        for tracked in self._catalog.pending():
            if tracked.state is not State.UPLOADED:
                active = self.active.get(tracked.name) or Active(tracked)
                pending.append(Pending(tracked, self._waiting(tracked), active.sending, active.is_sent))
        going = Going(left_s, self._catalog.newest_durable_step, usual)
        early = [place.name for place, _ in self._early.sendings()]
        self._flush.decide(going, pending, lambda: self._early.writing(alive=trainer_alive()), early)

    def begin(self) -> list[Active]:
        """Let those in whose turn it is, and return them."""
        queue, begun = self._pending(), []
        self._let_first_through(queue)
        for tracked in queue:
            if tracked.name not in self.active:
                self.active[tracked.name] = Active(tracked)
                begun.append(self.active[tracked.name])
            active = self.active[tracked.name]
            if active.tracked is not tracked or (active.sending is None and not active.is_sent):
                break  # those behind begin when this one has nothing left to hand out
            if active.sending is not None and active.sending.has_more and not active.sending.standing.refused:
                break
        return begun

    def all(self) -> dict[str, Sending]:
        """Return what is being sent, by checkpoint; also what the trainer still writes."""
        sending = {place.name: its for place, its in self._early.sendings()}
        return sending | {a.tracked.name: a.sending for a in self.active.values() if a.sending is not None}

    def in_order(self) -> list[Sending]:
        """Return what is being sent, in the order in which it is, and say in the catalog who pauses."""
        sending = self.all()
        self._flush.forget([*sending, *self.active])
        ordered = self._sorted(sending)
        if (next_up := self.handed_over()) is not None and self._flush.plan is not None:
            rank_of = self._flush.plan.rank()
            ordered = [its for its in ordered if rank_of.get(its.name, len(rank_of)) <= rank_of.get(next_up, -1)]
        for rank, its in enumerate(ordered):
            self._say_whose_turn_it_is(its, is_first=rank == 0 or not ordered[0].has_more)
        return ordered

    def handed_over(self) -> str | None:
        """Return the name of a checkpoint that is being taken over from what was sent early."""
        return next((name for name, active in self.active.items() if active.hands_over), None)

    def goes_first(self, one: Tracked, other: Tracked) -> bool:
        """Whether one checkpoint is sent before another."""
        return one is not other and upload_order(map(self._waiting, (other, one)))[0].name == one.name

    def waits_for_others(self, tracked: Tracked) -> bool:
        """Whether a checkpoint's own part is in the store."""
        return tracked.state is State.UPLOADED and tracked.name not in self.active

    def _pending(self) -> list[Tracked]:
        waiting = {t.name: t for t in self._catalog.pending() if t.state is not State.UPLOADED}
        if self._flush.plan is not None:
            rank = self._flush.plan.rank()
            return sorted(waiting.values(), key=lambda t: rank.get(t.name, len(rank)))
        return [waiting[w.name] for w in send_order(map(self._waiting, waiting.values()), running=self._first)]

    def _waiting(self, tracked: Tracked) -> Waiting:
        active = self.active.get(tracked.name)
        refused = active is not None and active.sending is not None and active.sending.standing.refused
        return replace(tracked.waiting, refused=refused or (active is not None and active.is_held))

    def _let_first_through(self, queue: list[Tracked]) -> None:
        first = queue[0].name if queue else None
        if first == self._first:
            return
        before = self.active.get(self._first) if self._first else None
        self._first = first
        has_more = before is not None and before.sending is not None and before.sending.has_more
        if first and before is not None and has_more and self._flush.plan is None:
            queue[0].overtook = overtakes(queue[0].waiting, before.tracked.waiting)
            before.tracked.overtook = False

    def _sorted(self, sending: dict[str, Sending]) -> list[Sending]:
        if self._flush.plan is not None:
            rank = self._flush.plan.rank()
            return [sending[name] for name in sorted(sending, key=lambda name: rank.get(name, len(rank)))]
        finished = [self._waiting(a.tracked) for a in self.active.values() if a.sending is not None]
        unfinished = [place for place, its in self._early.sendings() if sending[place.name] is its]
        return [sending[place.name] for place in send_order([*finished, *unfinished], running=self._first)]

    def _say_whose_turn_it_is(self, sending: Sending, *, is_first: bool) -> None:
        active = self.active.get(sending.name)
        if active is None or active.sending is not sending:
            return
        if is_first and active.tracked.state is State.PAUSED:
            say_uploading(self._catalog, active.tracked, sending)
        elif not is_first and active.tracked.state in (State.UPLOADING, State.PAUSED) and sending.has_more:
            self._catalog.move(active.tracked, State.PAUSED, reason=self._flush.why(active.tracked.name))


def say_uploading(catalog: Catalog, tracked: Tracked, sending: Sending) -> None:
    """Say that a checkpoint is sent now, and how much of it was before."""
    size_bytes = tracked.checkpoint.size_bytes if tracked.checkpoint else 0
    catalog.move(tracked, State.UPLOADING, size_bytes=size_bytes, already_sent_bytes=sending.sent_bytes())
