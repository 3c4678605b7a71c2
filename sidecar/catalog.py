"""All checkpoints that this sidecar knows, each with its state: the one place where states change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sidecar.core.local import Finished
from sidecar.core.order import Waiting
from sidecar.core.states import PENDING, State, may_follow
from sidecar.events import Events
from trainer_hook.contract import rfc3339

_LEVELS = {State.REJECTED: "warning", State.LOST: "error", State.GIVEN_UP: "error"}


@dataclass(slots=True)
class Tracked:
    """One checkpoint. ``version`` is its marker's; a marker that is written again makes a new version of the same name."""

    name: str
    version: str
    state: State
    checkpoint: Finished | None = None
    """``None`` while it is written or when it was rejected."""
    reason: str | None = None
    """Why it is in this state, where that needs saying."""
    sent_bytes: int = 0
    overtook: bool = False
    committed_at_s: float | None = None

    @property
    def waiting(self) -> Waiting:
        """What the upload order looks at."""
        checkpoint = self.checkpoint
        # ``final`` is superseded by no step, whatever its marker says of its own.
        step = checkpoint.resume_step if checkpoint else None
        return Waiting(self.name, step, bool(checkpoint and checkpoint.urgent), self.overtook)


class Catalog:
    """Used from the event loop only. Every change is an event and wakes who waits on ``changed``."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._tracked: dict[str, Tracked] = {}
        self._changed = asyncio.Event()
        self.newest_durable: Tracked | None = None
        self.newest_durable_step: int | None = None
        self.on_durable: Callable[[Tracked], None] = lambda tracked: None
        """Called with each checkpoint that was committed, or was found committed."""

    def get(self, name: str) -> Tracked | None:
        """Return what is known of a name."""
        return self._tracked.get(name)

    def all(self) -> list[Tracked]:
        """Return all, in no order."""
        return list(self._tracked.values())

    def pending(self) -> list[Tracked]:
        """Return those that the trainer finished and that are not durable yet."""
        return [t for t in self._tracked.values() if t.state in PENDING]

    def finished(self, checkpoint: Finished, *, held: bool) -> Tracked:
        """A checkpoint was finished, or finished anew."""
        tracked = Tracked(checkpoint.name, checkpoint.version, State.FINISHED, checkpoint)
        self._tracked[checkpoint.name] = tracked
        self._tell(
            tracked,
            step=checkpoint.step,
            files=len(checkpoint.files),
            size_bytes=checkpoint.size_bytes,
            save_reason=checkpoint.reason,
            created_at=rfc3339(checkpoint.created_at_s),
            held=held,
        )
        return tracked

    def rejected(self, name: str, version: str, reason: str) -> None:
        """A directory is not a valid checkpoint."""
        tracked = Tracked(name, version, State.REJECTED, reason=reason)
        self._tracked[name] = tracked
        self._tell(tracked, hint="write its files and then its marker again")

    def move(self, tracked: Tracked, state: State, *, reason: str | None = None, **fields: Any) -> None:
        """Change the state of a checkpoint. One that was replaced by a newer version is left as it is.

        Raises:
            AssertionError: The state machine does not know the change: a mistake in this program.
        """
        if (tracked.state is state and tracked.reason == reason) or self._tracked.get(tracked.name) is not tracked:
            return
        assert may_follow(tracked.state, state), f"{tracked.name}: {tracked.state} → {state}"
        tracked.state, tracked.reason = state, reason
        self._tell(tracked, **fields)

    def durable(self, tracked: Tracked, *, at_s: float, **fields: Any) -> None:
        """A checkpoint was committed, or was found committed."""
        if self._tracked.get(tracked.name) is not tracked:
            return
        tracked.committed_at_s = at_s
        step = tracked.checkpoint.resume_step if tracked.checkpoint else None
        if step is not None and step >= (self.newest_durable_step if self.newest_durable_step is not None else -1):
            self.newest_durable, self.newest_durable_step = tracked, step
        self.move(tracked, State.COMMITTED, step=tracked.checkpoint.step if tracked.checkpoint else None, **fields)
        self.on_durable(tracked)

    def forget(self, name: str) -> None:
        """A directory is gone and nothing is left to do for it."""
        self._tracked.pop(name, None)
        self._wake()

    async def changed(self) -> None:
        """Wait for the next change."""
        await self._changed.wait()

    def _tell(self, tracked: Tracked, **fields: Any) -> None:
        said = {key: value for key, value in (fields | {"reason": tracked.reason}).items() if value is not None}
        event = f"checkpoint_{tracked.state.value.replace('-', '_')}"
        self._events.happened(event, level=_LEVELS.get(tracked.state, "info"), checkpoint=tracked.name, **said)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
