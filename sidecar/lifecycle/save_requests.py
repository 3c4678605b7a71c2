"""Save requests: the request to the trainer, its answer, and the durability of the checkpoint."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any, Literal

import structlog

from sidecar.catalog.catalog import Catalog, Tracked
from sidecar.catalog.events import Events
from sidecar.core.lifecycle.states import NEVER_DURABLE, State
from sidecar.tasks import within
from sidecar.volume.volume import Volume
from trainer_hook.contract import (
    ANSWER,
    REQUEST,
    AnswerFile,
    ContractError,
    RequestFile,
    encode_request,
    parse_answer,
    parse_request,
)
from trainer_hook.contract.plain_text import plain_text

log = structlog.get_logger()

POLL_S = 0.5
"""Poll interval for the answer while a client waits, in seconds."""
UNANSWERED_S = 30.0
"""Seconds without an answer after which the request's detail says so."""
KEPT = 20


@dataclass(slots=True, eq=False)
class SaveRequest:
    """A save request. Times are monotonic seconds unless stated otherwise."""

    id: str
    action: str
    asked_s: float
    asked_at_s: float
    """Epoch seconds."""
    state: Literal["asked", "saved", "durable", "failed"] = "asked"
    checkpoint: str | None = None
    detail: str | None = None
    followed_by: str | None = None
    """Id of a later request to the same trainer, whose answer also counts for this one; ``None``: there is none."""

    @property
    def is_over(self) -> bool:
        """Whether its outcome is final."""
        return self.state in ("durable", "failed")


class SaveRequests:
    """Save requests by id. Used from the event loop alone."""

    def __init__(self, volume: Volume, catalog: Catalog, events: Events) -> None:
        self._volume = volume
        self._catalog = catalog
        self._events = events
        self._saves: dict[str, SaveRequest] = {}
        # At once: retention may delete a checkpoint as soon as it is durable, and the next scan of the volume forgets it.
        catalog.observe(lambda tracked: self.update())

    def ask(self, *, stop: bool) -> SaveRequest:
        """Ask the trainer to save, and with ``stop`` to end training. An unanswered request is joined.

        Raises:
            OSError: The volume is not writable.
        """
        self.update()
        waiting = next((save for save in reversed(self._saves.values()) if save.state == "asked"), None)
        if waiting is not None and (waiting.action == "save-and-stop" or not stop):
            return waiting
        asked = SaveRequest(uuid.uuid4().hex, "save-and-stop" if stop else "save", time.monotonic(), time.time())
        (self._volume / REQUEST).publish(encode_request(RequestFile(asked.id, asked.action)))
        if waiting is not None:
            waiting.followed_by = asked.id
        self._remember(asked)
        self._events.happened("save_asked", id=asked.id, action=asked.action)
        return asked

    @property
    def latest(self) -> SaveRequest | None:
        """The latest request of this process, as it was updated last; ``None``: there is none."""
        return next(reversed(self._saves.values()), None)

    def ask_running_trainer(self) -> None:
        """Ask for a save without stop if a trainer is running; a volume that is not writable is only logged."""
        if self._volume.held_leases():
            try:
                self.ask(stop=False)
            except OSError as error:
                log.warning("save_not_asked", error=error.strerror)

    def get(self, identifier: str) -> SaveRequest | None:
        """Return a request with its present state, also an open one of an earlier sidecar process; ``None``: unknown."""
        if identifier not in self._saves:
            self._restore(identifier)
        self.update()
        return self._saves.get(identifier)

    async def settled(self, save: SaveRequest, *, timeout_s: float) -> None:
        """Wait until a request's outcome is final, at most ``timeout_s`` seconds."""
        until_s = time.monotonic() + timeout_s
        while not save.is_over and (left_s := until_s - time.monotonic()) > 0:
            await within(min(POLL_S, left_s), self._catalog.changed())
            self.update()

    def update(self) -> None:
        """Update all open requests: answers of the trainer, and durable checkpoints."""
        for save in list(self._saves.values()):
            if not save.is_over:
                before = save.state
                self._update(save)
                if save.state != before:
                    level = "warning" if save.state == "failed" else "info"
                    fields = {"checkpoint": save.checkpoint, "reason": save.detail if save.state == "failed" else None}
                    known: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
                    self._events.happened(f"save_{save.state}", level=level, id=save.id, **known)

    def _update(self, save: SaveRequest) -> None:
        if save.state == "asked":
            self._read_answer(save)
        if save.state == "saved" and save.checkpoint is not None:
            tracked = self._known(save.checkpoint)
            if tracked is not None and tracked.state is State.COMMITTED:
                save.state, save.detail = "durable", None
            elif tracked is not None and tracked.state in NEVER_DURABLE:
                save.state, save.detail = "failed", f"{tracked.name} is {tracked.state.value}: {tracked.reason}"
            else:
                save.detail = "it is on its way to the store"

    def _known(self, name: str) -> Tracked | None:
        """Return a checkpoint in the version that is on the volume; ``None``: it was not examined yet."""
        tracked = self._catalog.get(name)
        is_present = tracked is not None and self._volume.marker_version(name) in (None, tracked.version)
        return tracked if is_present else None

    def _read_answer(self, save: SaveRequest) -> None:
        follower = self._saves.get(save.followed_by or "")
        is_alive = self._volume.held_leases()  # read first: a trainer may answer and end meanwhile
        answer = self._answer()
        if follower is not None and follower.state != "asked":
            save.state, save.checkpoint, save.detail = follower.state, follower.checkpoint, follower.detail
        elif answer is not None and answer.id == save.id:
            save.state = "saved" if answer.outcome == "saved" else "failed"
            save.checkpoint, save.detail = answer.checkpoint, answer.reason and plain_text(answer.reason)
        elif (made := self._made_since(save)) is not None:
            save.state, save.checkpoint = "saved", made.name
        elif not is_alive:
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

    def _made_since(self, save: SaveRequest) -> Tracked | None:
        # For hooks that write no answers.
        made = [t for t in self._catalog.all() if t.checkpoint and t.checkpoint.reason in ("manual", "jit")]
        return next((t for t in made if t.checkpoint and t.checkpoint.created_at_s >= save.asked_at_s), None)

    def _answer(self) -> AnswerFile | None:
        raw = self._volume.read_small(ANSWER)
        try:
            return None if raw is None else parse_answer(raw)
        except ContractError:
            return None

    def _restore(self, identifier: str) -> None:
        raw = self._volume.read_small(REQUEST)
        try:
            asked = None if raw is None else parse_request(raw)
            written_s = (self._volume / REQUEST).status().st_mtime
        except (ContractError, OSError):
            return
        if asked is not None and asked.id == identifier:
            age_s = max(0.0, time.time() - written_s)
            self._remember(SaveRequest(asked.id, asked.action, time.monotonic() - age_s, written_s))

    def _remember(self, save: SaveRequest) -> None:
        self._saves[save.id] = save
        while len(self._saves) > KEPT:
            self._saves.pop(next(iter(self._saves)))
