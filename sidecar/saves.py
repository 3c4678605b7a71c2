"""Saves on request: what was asked of the trainer, what it answered, and whether that is durable."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import Any, Literal

from sidecar.catalog import Catalog, Tracked
from sidecar.core.states import State
from sidecar.events import Events
from sidecar.volume.files import publish
from sidecar.volume.volume import Volume
from trainer_hook.contract import ANSWER, REQUEST, Answer, ContractError, Request, encode_request, parse_answer, parse_request

LOOK_S = 0.5
"""How often the answer is looked for while somebody waits."""
UNANSWERED_S = 30.0
"""After this long somebody who waits is told that the trainer says nothing."""
KEPT = 20
_NEVER = frozenset({State.LOST, State.REJECTED, State.GIVEN_UP, State.SUPERSEDED})


@dataclass(slots=True, eq=False)
class Save:
    """One request. Times are monotonic."""

    id: str
    action: str
    asked_s: float
    asked_at_s: float
    """Epoch seconds."""
    state: Literal["asked", "saved", "durable", "failed"] = "asked"
    checkpoint: str | None = None
    detail: str | None = None
    followed_by: str | None = None
    """A later request of the same trainer, whose answer is this one's, too."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more will become of it."""
        return self.state in ("durable", "failed")


class Saves:
    """Used from the event loop only."""

    def __init__(self, volume: Volume, catalog: Catalog, events: Events) -> None:
        self._volume = volume
        self._catalog = catalog
        self._events = events
        self._saves: dict[str, Save] = {}

    def ask(self, *, stop: bool) -> Save:
        """Ask the trainer to save, and to stop. A request that it has not answered yet is joined.

        Raises:
            OSError: The volume is not writable.
        """
        self.look()
        waiting = next((save for save in reversed(self._saves.values()) if save.state == "asked"), None)
        if waiting is not None and (waiting.action == "save-and-stop" or not stop):
            return waiting
        asked = Save(uuid.uuid4().hex, "save-and-stop" if stop else "save", time.monotonic(), time.time())
        publish(self._volume.root / REQUEST, encode_request(Request(asked.id, asked.action)))
        if waiting is not None:
            waiting.followed_by = asked.id
        self._remember(asked)
        self._events.happened("save_asked", id=asked.id, action=asked.action)
        return asked

    def get(self, identifier: str) -> Save | None:
        """Return a request as it stands now, also one of an earlier life of the sidecar that is still open."""
        if identifier not in self._saves:
            self._take_up(identifier)
        self.look()
        return self._saves.get(identifier)

    async def settled(self, save: Save, *, timeout_s: float) -> None:
        """Return when nothing more will become of a request, or after ``timeout_s``."""
        until_s = time.monotonic() + timeout_s
        while not save.is_over and (left_s := until_s - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(min(LOOK_S, left_s)):
                    await self._catalog.changed()
            except TimeoutError:
                pass
            self.look()

    def look(self) -> None:
        """See what was answered and what became durable."""
        for save in list(self._saves.values()):
            if not save.is_over:
                before = save.state
                self._look_at(save)
                if save.state != before:
                    level = "warning" if save.state == "failed" else "info"
                    said = {"checkpoint": save.checkpoint, "reason": save.detail if save.state == "failed" else None}
                    known: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
                    self._events.happened(f"save_{save.state}", level=level, id=save.id, **known)

    def _look_at(self, save: Save) -> None:
        if save.state == "asked":
            self._look_for_answer(save)
        if save.state == "saved" and save.checkpoint is not None:
            tracked = self._catalog.get(save.checkpoint)
            if tracked is not None and tracked.state is State.COMMITTED:
                save.state, save.detail = "durable", None
            elif tracked is not None and tracked.state in _NEVER:
                save.state, save.detail = "failed", f"{tracked.name} is {tracked.state.value}: {tracked.reason}"
            else:
                save.detail = "it is on its way to the store"

    def _look_for_answer(self, save: Save) -> None:
        follower = self._saves.get(save.followed_by or "")
        answer = self._answer()
        if follower is not None and follower.state != "asked":
            save.state, save.checkpoint, save.detail = follower.state, follower.checkpoint, follower.detail
        elif answer is not None and answer.id == save.id:
            save.state = "saved" if answer.outcome == "saved" else "failed"
            save.checkpoint, save.detail = answer.checkpoint, answer.reason
        elif (made := self._made_since(save)) is not None:
            save.state, save.checkpoint = "saved", made.name
        elif not self._volume.held_leases():
            save.state, save.detail = "failed", "the trainer ended without an answer"
        else:
            save.detail = self._unanswered(time.monotonic() - save.asked_s)

    def _unanswered(self, since_s: float) -> str:
        if since_s < UNANSWERED_S:
            return "the trainer saves at the end of its step"
        return (
            f"the trainer has not answered for {since_s:.0f} s: it answers at the end of a step of train(); "
            "its step may be long, it may hang, or it may be doing something else; ask again or look at its log"
        )

    def _made_since(self, save: Save) -> Tracked | None:
        # A hook that writes no answers.
        made = [t for t in self._catalog.all() if t.checkpoint and t.checkpoint.reason in ("manual", "jit")]
        return next((t for t in made if t.checkpoint and t.checkpoint.created_at_s >= save.asked_at_s), None)

    def _answer(self) -> Answer | None:
        raw = self._volume.read_small(ANSWER)
        try:
            return None if raw is None else parse_answer(raw)
        except ContractError:
            return None

    def _take_up(self, identifier: str) -> None:
        raw = self._volume.read_small(REQUEST)
        try:
            asked = None if raw is None else parse_request(raw)
            written_s = (self._volume.root / REQUEST).stat().st_mtime
        except (ContractError, OSError):
            return
        if asked is not None and asked.id == identifier:
            age_s = max(0.0, time.time() - written_s)
            self._remember(Save(asked.id, asked.action, time.monotonic() - age_s, written_s))

    def _remember(self, save: Save) -> None:
        self._saves[save.id] = save
        while len(self._saves) > KEPT:
            self._saves.pop(next(iter(self._saves)))
