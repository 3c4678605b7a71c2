"""Catalog of all known checkpoints with their states. States change only here."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sidecar.catalog.events import Events
from sidecar.core.commit.training_line import finished_later, was_finished_later
from sidecar.core.format.attempts import NOTHING_SEEN, Seen
from sidecar.core.format.found_checkpoint import Finished
from sidecar.core.lifecycle.rejection import Marked, newest_rejected
from sidecar.core.lifecycle.save_profile import save_profile
from sidecar.core.lifecycle.states import PENDING, State, may_follow
from sidecar.core.schedule.order import Waiting
from trainer_hook.contract import rfc3339, step_of
from trainer_hook.contract.plain_text import plain_text

MOST_BEFORE = 4
"""Number of earlier newest durable checkpoints that are kept, for the case that the newest one loses its commit."""
_LEVELS = {State.REJECTED: "warning", State.LOST: "error", State.GIVEN_UP: "error"}


@dataclass(slots=True)
class Tracked:
    """A checkpoint in the catalog. ``version``: that of its marker; a rewritten marker starts a new version of the name."""

    name: str
    version: str
    state: State
    checkpoint: Finished | None = None
    """``None`` while it is unfinished, or if it was rejected."""
    reason: str | None = None
    """Reason of its state; ``None``: the state speaks for itself."""
    sent_bytes: int = 0
    overtook: bool = False
    committed_at_s: float | None = None
    marked_at_s: float = 0.0
    """Time of its marker, epoch seconds."""

    @property
    def size_bytes(self) -> int:
        """Size of its files; 0 for one that was rejected."""
        return self.checkpoint.size_bytes if self.checkpoint else 0

    @property
    def is_restored(self) -> bool:
        """Whether its files were downloaded from the store."""
        return self.checkpoint is not None and self.checkpoint.restored_from is not None

    def set_sent_bytes(self, sent_bytes: int) -> int:
        """Set the number of its bytes in the store, and return it: at most its size, whatever else its journal counts."""
        size_bytes = self.checkpoint.size_bytes if self.checkpoint else sent_bytes
        self.sent_bytes = min(sent_bytes, size_bytes)
        return self.sent_bytes

    @property
    def waiting(self) -> Waiting:
        """The checkpoint as the upload order needs it."""
        checkpoint = self.checkpoint
        # No step supersedes ``final``, whatever step its own marker has.
        step = checkpoint.resume_step if checkpoint else None
        shared = checkpoint is not None and checkpoint.node.count > 1
        return Waiting(self.name, step, bool(checkpoint and checkpoint.urgent), self.overtook, shared=shared)

    @property
    def marked(self) -> Marked:
        """The checkpoint as the comparison of rejected and durable ones needs it."""
        checkpoint = self.checkpoint
        step = checkpoint.resume_step if checkpoint else step_of(self.name)
        return Marked(self.name, step, self.marked_at_s, self.is_restored)


class Catalog:
    """Checkpoints by name. Used from the event loop alone. Every change is an event, and wakes the waiters of ``changed``."""

    def __init__(self, events: Events, *, seen: Callable[[], Seen] = Seen) -> None:
        """Start empty. ``seen``: returns what this pod has seen of the order of attempts."""
        self._events = events
        self._seen = seen
        self._tracked: dict[str, Tracked] = {}
        self._replaced: list[Tracked] = []
        self._changed = asyncio.Event()
        self.newest_durable: Tracked | None = None
        self.newest_durable_step: int | None = None
        self._newest_before: deque[Tracked] = deque(maxlen=MOST_BEFORE)
        """Checkpoints that were the newest durable one before, also those that have left the volume; the latest last."""
        self._observers: list[Callable[[Tracked], object]] = []

    def observe(self, became_durable: Callable[[Tracked], object]) -> None:
        """Call ``became_durable`` with each checkpoint that was committed, or was found committed."""
        self._observers.append(became_durable)

    def get(self, name: str) -> Tracked | None:
        """Return the checkpoint of a name; ``None``: unknown."""
        return self._tracked.get(name)

    def all(self) -> list[Tracked]:
        """Return all, in no order."""
        return list(self._tracked.values())

    def is_replaced(self, tracked: Tracked) -> bool:
        """Whether a checkpoint was finished anew, or forgotten."""
        return self._tracked.get(tracked.name) is not tracked

    def take_replaced(self) -> list[Tracked]:
        """Return the pending versions that were replaced or superseded here since the last call, each once."""
        replaced, self._replaced = self._replaced, []
        return replaced

    def supersede(self, tracked: Tracked, reason: str) -> None:
        """End a pending checkpoint that is not sent any more; what was sent of it is discarded, as of a replaced version."""
        if self.is_current(tracked):
            self.move(tracked, State.SUPERSEDED, reason=reason)
            self._replaced.append(tracked)

    def is_current(self, tracked: Tracked) -> bool:
        """Whether a checkpoint is still to become durable: neither replaced nor decided."""
        return not self.is_replaced(tracked) and tracked.state in PENDING

    def pending(self) -> list[Tracked]:
        """Return the finished checkpoints that are not durable yet."""
        return [t for t in self._tracked.values() if t.state in PENDING]

    def newest_finished(self) -> Tracked | None:
        """Return the finished checkpoint with the highest step; ``None``: there is none."""
        steps = {t.checkpoint.resume_step: t for t in self.all() if t.checkpoint and t.checkpoint.resume_step is not None}
        return steps[max(steps)] if steps else None

    def newest_rejected(self) -> list[Tracked]:
        """Return the rejected checkpoints that are newer than every durable one: the newest state is not in the store."""
        rejected = {t.name: t for t in self._tracked.values() if t.state is State.REJECTED}
        durable = [t for t in [*self._tracked.values(), self.newest_durable] if t is not None and t.committed_at_s is not None]
        names = newest_rejected(
            [t.marked for t in rejected.values()], [t.marked for t in durable], newest_durable_step=self.newest_durable_step
        )
        return [rejected[name] for name in names]

    def finished(self, checkpoint: Finished, *, held: bool) -> Tracked:
        """Add a finished checkpoint, or a new version of one."""
        tracked = Tracked(checkpoint.name, checkpoint.version, State.FINISHED, checkpoint, marked_at_s=checkpoint.marked_at_s)
        self._replace(tracked)
        took_s = save_profile(checkpoint).took_s if checkpoint.restored_from is None else None
        self._tell(
            tracked,
            step=checkpoint.step,
            files=len(checkpoint.files),
            size_bytes=checkpoint.size_bytes,
            save_reason=checkpoint.reason,
            created_at=rfc3339(checkpoint.created_at_s),
            held=held,
            save_s=None if took_s is None else round(took_s, 3),
        )
        return tracked

    def rejected(self, name: str, version: str, reason: str, *, marked_at_s: float) -> None:
        """Add a rejected directory. ``marked_at_s``: time of its marker, epoch seconds."""
        tracked = Tracked(name, version, State.REJECTED, reason=plain_text(reason), marked_at_s=marked_at_s)
        self._replace(tracked)
        self._tell(tracked, hint="correct what the reason names, then save the step again")

    def _replace(self, tracked: Tracked) -> None:
        before = self._tracked.get(tracked.name)
        if before is not None and before.state in PENDING:
            self._replaced.append(before)
        self._tracked[tracked.name] = tracked

    def move(self, tracked: Tracked, state: State, *, reason: str | None = None, **fields: Any) -> None:
        """Change the state of a checkpoint. A version that has been replaced by a newer one does not change.

        Raises:
            AssertionError: The transition is not allowed, which is a bug.
        """
        reason = None if reason is None else plain_text(reason)
        if (tracked.state is state and tracked.reason == reason) or self._tracked.get(tracked.name) is not tracked:
            return
        assert may_follow(tracked.state, state), f"{tracked.name}: {tracked.state} → {state}"
        was_durable, tracked.state, tracked.reason = tracked.state is State.COMMITTED, state, reason
        if was_durable and state is not State.COMMITTED:
            tracked.committed_at_s = None
            self.revoked(tracked.name)
        self._tell(tracked, **fields)

    def revoked(self, name: str) -> None:
        """Record that the commit of a name is gone. The newest durable one is then another, as far as this process knows."""
        others = [t for t in (*self._newest_before, *self._tracked.values()) if t.name != name and t.state is State.COMMITTED]
        if self.newest_durable is None or self.newest_durable.name != name:
            self._newest_before = deque((t for t in self._newest_before if t.name != name), maxlen=MOST_BEFORE)
            return
        self._newest_before.clear()
        self.newest_durable = self.newest_durable_step = None
        for tracked in others:
            self._note_durable(tracked)

    def durable(self, tracked: Tracked, *, at_s: float, **fields: Any) -> None:
        """Record a checkpoint that was committed, or was found committed at ``at_s`` (epoch seconds)."""
        if self._tracked.get(tracked.name) is not tracked:
            return
        tracked.committed_at_s = at_s
        self._note_durable(tracked)
        self.move(tracked, State.COMMITTED, step=tracked.checkpoint.step if tracked.checkpoint else None, **fields)
        for became_durable in self._observers:
            became_durable(tracked)

    def is_after_newest_durable(self, tracked: Tracked) -> bool:
        """Whether a checkpoint was finished later than the newest durable one, whatever their steps (after an older resume)."""
        return self.newest_durable is not None and self._is_after(tracked, self.newest_durable)

    def is_of_abandoned_attempt(self, tracked: Tracked) -> bool:
        """Whether the newest durable checkpoint is of a later attempt, which may have resumed from an older step."""
        newest = self.newest_durable
        if newest is None or newest.checkpoint is None or tracked.checkpoint is None:
            return False
        return newest.checkpoint.attempt != tracked.checkpoint.attempt and self._is_after(newest, tracked)

    def is_abandoned_part(self, tracked: Tracked) -> bool:
        """Whether a checkpoint is one node's part of a step that no node will complete: a later attempt has a durable step."""
        return tracked.checkpoint is not None and tracked.checkpoint.node.count > 1 and self.is_of_abandoned_attempt(tracked)

    def _note_durable(self, tracked: Tracked) -> None:
        step = tracked.checkpoint.resume_step if tracked.checkpoint else None
        if step is None or not self._becomes_newest_durable(tracked, step):
            return
        if self.newest_durable is not None and self.newest_durable is not tracked:
            self._newest_before.append(self.newest_durable)
        self.newest_durable, self.newest_durable_step = tracked, step

    def _becomes_newest_durable(self, tracked: Tracked, step: int) -> bool:
        newest = self.newest_durable
        if newest is None or self.newest_durable_step is None or self._is_after(tracked, newest):
            return True
        # A higher step of an earlier attempt, committed late, is of an abandoned line.
        return step >= self.newest_durable_step and not self._is_after(newest, tracked)

    def _is_after(self, tracked: Tracked, other: Tracked) -> bool:
        """Whether a checkpoint was finished later than another one."""
        ours, theirs = tracked.checkpoint, other.checkpoint
        if ours is None or theirs is None:
            return False
        # What the pod has seen is read from the volume. Within an attempt it says nothing.
        return was_finished_later(ours, theirs, NOTHING_SEEN if ours.attempt == theirs.attempt else self._seen())

    def finished_later(self, tracked: Tracked, others: Iterable[Tracked]) -> int:
        """Return how many of the others were certainly finished later than a checkpoint."""
        theirs = [other.checkpoint for other in others if other.checkpoint is not None]
        return finished_later(tracked.checkpoint, theirs, self._seen()) if tracked.checkpoint is not None else 0

    def forget(self, name: str) -> None:
        """Remove a checkpoint whose directory was deleted and which needs no further work."""
        self._tracked.pop(name, None)
        self._wake()

    async def changed(self) -> None:
        """Wait for the next change."""
        await self._changed.wait()

    def _tell(self, tracked: Tracked, **fields: Any) -> None:
        known = {key: value for key, value in (fields | {"reason": tracked.reason}).items() if value is not None}
        event = f"checkpoint_{tracked.state.value.replace('-', '_')}"
        self._events.happened(event, level=_LEVELS.get(tracked.state, "info"), checkpoint=tracked.name, **known)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
