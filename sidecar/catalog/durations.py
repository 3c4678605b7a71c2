"""Durations of saves, uploads, commits, resumes and API calls, as histograms. All but the last are read from events.

A histogram exists from the start for each known label, but for API calls, which are many: ``rate()`` does not count the first
duration of a series that appears with it, and a pod resumes once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from sidecar.core.lifecycle.histogram import Histogram
from trainer_hook.contract import REASONS

TRANSFERS_S = (0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Bounds for what moves a checkpoint, dense around usual grace periods."""
CALLS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bounds for API calls."""
SAVE_REASONS = (*REASONS, "unknown")
OUTCOMES = ("ready", "none", "failed")
"""Of resumes."""
MOST_WAITING = 1000
"""Number of uploaded checkpoints whose commit is waited for; those beyond it are not measured."""


class Durations:
    """Histograms by the value of their one label. Used from the event loop alone."""

    def __init__(self, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self.save = _empty(SAVE_REASONS)
        """By reason of the save."""
        self.upload = _empty(SAVE_REASONS)
        """By reason of the save."""
        self.commit = _empty(("",))
        self.durable = _empty(SAVE_REASONS)
        """By reason of the save."""
        self.resume = _empty(OUTCOMES)
        """By outcome."""
        self.api: dict[str, Histogram] = {}
        """By method and route."""
        self._reasons: dict[str, str] = {}
        self._uploaded_s: dict[str, float] = {}

    def answered(self, call: str, took_s: float) -> None:
        """Count an API call. ``call``: its method and route, not its path, which is the client's."""
        _observe(self.api, call, took_s, CALLS_S)

    def happened(self, name: str, fields: dict[str, Any]) -> None:
        """Count the durations that an event has."""
        if name.startswith("resume_") and "took_s" in fields:
            _observe(self.resume, name.removeprefix("resume_"), fields["took_s"], TRANSFERS_S)
        if not name.startswith("checkpoint_") or "checkpoint" not in fields:
            return
        checkpoint = str(fields["checkpoint"])
        if name == "checkpoint_finished" and "save_reason" in fields:
            self._reasons[checkpoint] = fields["save_reason"]
            if "save_s" in fields:
                _observe(self.save, self._reason(checkpoint), fields["save_s"], TRANSFERS_S)
        elif name == "checkpoint_uploaded":
            if "upload_s" in fields:  # the first of these events: it may be repeated while it waits for other nodes
                _observe(self.upload, self._reason(checkpoint), fields["upload_s"], TRANSFERS_S)
                self._uploaded_s[checkpoint] = self._now_s()
        elif name == "checkpoint_committed":
            if "saved_to_durable_s" in fields:
                _observe(self.durable, self._reason(checkpoint), fields["saved_to_durable_s"], TRANSFERS_S)
            if (uploaded_s := self._uploaded_s.get(checkpoint)) is not None:
                _observe(self.commit, "", self._now_s() - uploaded_s, TRANSFERS_S)
            self._forget(checkpoint)
        elif name in ("checkpoint_superseded", "checkpoint_lost", "checkpoint_given_up", "checkpoint_rejected"):
            self._forget(checkpoint)
        while len(self._reasons) > MOST_WAITING:
            self._forget(next(iter(self._reasons)))

    def _reason(self, checkpoint: str) -> str:
        return self._reasons.get(checkpoint, "unknown")

    def _forget(self, checkpoint: str) -> None:
        self._reasons.pop(checkpoint, None)
        self._uploaded_s.pop(checkpoint, None)


def _empty(labels: Iterable[str]) -> dict[str, Histogram]:
    return {label: Histogram(TRANSFERS_S) for label in labels}


def _observe(histograms: dict[str, Histogram], label: str, duration_s: float, bounds_s: tuple[float, ...]) -> None:
    histograms.setdefault(label, Histogram(bounds_s)).observe(duration_s)
