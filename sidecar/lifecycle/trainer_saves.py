"""Logs that the trainer's saves fail, and that they succeed again. Its own log has each of them."""

from __future__ import annotations

from sidecar.catalog.events import Events
from sidecar.core.lifecycle.trainer_saves import News, Told, news
from sidecar.lifecycle.pod import Pod
from trainer_hook.contract.plain_text import plain_text


class TrainerSaves:
    """Follows what the hook tells about its saves."""

    def __init__(self, pod: Pod, events: Events) -> None:
        self._pod = pod
        self._events = events
        self._told: Told | None = None

    def update(self) -> None:
        """Log what has changed. Called at each scan of the volume."""
        if (trainer := self._pod.present_trainer()) is None:
            return
        now = Told(trainer.attempt, trainer.pid, trainer.save_error)
        found, self._told = news(self._told, now), now
        if found is News.FAIL:
            self._events.happened(found.value, level="error", error=plain_text(trainer.save_error or ""))
        elif found is News.AGAIN:
            self._events.happened(found.value)
