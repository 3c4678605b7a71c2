"""Spans of a checkpoint from the trainer to the store: save, scan, upload, commit. Read from the events of the sidecar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sidecar.core.format.attempts import seconds

MOST_KNOWN = 1000
"""Number of checkpoints whose end is waited for; those that were finished first are forgotten beyond it."""
_ATTRIBUTES = {
    "step": "checkpoint.step",
    "size_bytes": "checkpoint.size_bytes",
    "files": "checkpoint.files",
    "save_reason": "checkpoint.save_reason",
    "attempt": "checkpoint.attempt",
    "already_sent_bytes": "checkpoint.sent_early_bytes",
    "retries": "checkpoint.retries",
}
_ENDS = {
    "checkpoint_committed": "committed",
    "checkpoint_superseded": "superseded",
    "checkpoint_lost": "lost",
    "checkpoint_given_up": "given-up",
}
_ERRORS = frozenset({"lost", "given-up"})

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the way. Times are epoch seconds."""

    name: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class CheckpointTrace:
    """The whole way of a checkpoint, and its parts in order."""

    whole: Span
    parts: tuple[Span, ...]
    attributes: Mapping[str, Value]
    """Of the whole and of every part."""
    error: str | None = None
    """Why it did not become durable; ``None``: it did, or a newer one replaced it."""


@dataclass(slots=True)
class _Way:
    saved_s: float
    save_s: float
    found_s: float
    attributes: dict[str, Value] = field(default_factory=dict)
    uploading_s: float | None = None
    uploaded_s: float | None = None

    def parts(self, end_s: float) -> list[Span]:
        parts = [Span("scan", self.saved_s, self.found_s)]
        if self.save_s > 0:
            parts.insert(0, Span("save", max(0.0, self.saved_s - self.save_s), self.saved_s))
        if self.uploading_s is not None:
            parts.append(Span("upload", self.uploading_s, self.uploaded_s or end_s))
        if self.uploaded_s is not None:
            parts.append(Span("commit", self.uploaded_s, end_s))
        return parts


class CheckpointTraces:
    """Follows the checkpoints that this process uploads, by name."""

    def __init__(self) -> None:
        self._ways: dict[str, _Way] = {}

    def happened(self, name: str, fields: Mapping[str, Any], *, at_s: float) -> CheckpointTrace | None:
        """Take an event at ``at_s`` (epoch seconds). Returns the trace of the checkpoint whose way ends with it."""
        checkpoint = fields.get("checkpoint")
        if not isinstance(checkpoint, str):
            return None
        if name == "checkpoint_finished":
            self._ways.pop(checkpoint, None)  # another version of the same name
            self._ways[checkpoint] = _found(checkpoint, fields, at_s)
            while len(self._ways) > MOST_KNOWN:
                self._ways.pop(next(iter(self._ways)))
        way = self._ways.get(checkpoint)
        if way is None:
            return None
        way.attributes |= {_ATTRIBUTES[key]: value for key, value in fields.items() if key in _ATTRIBUTES and value is not None}
        if name == "checkpoint_uploading":
            if way.uploading_s is None:  # not where it continues after a pause
                way.uploading_s, way.uploaded_s = at_s, None  # what was found in the store before is sent again
        elif name == "checkpoint_uploaded":
            way.uploaded_s = at_s if way.uploaded_s is None else way.uploaded_s  # told again while other nodes are waited for
        elif name in _ENDS:
            del self._ways[checkpoint]
            return _ended(way, _ENDS[name], fields.get("reason"), at_s)
        return None


def _found(checkpoint: str, fields: Mapping[str, Any], at_s: float) -> _Way:
    created_s = seconds(str(fields.get("created_at")))
    # Below 0: of a clock that was not set; a span cannot begin before 1970.
    saved_s = at_s if created_s is None or created_s < 0 else min(at_s, created_s)
    return _Way(saved_s, max(0.0, float(fields.get("save_s") or 0.0)), at_s, {"checkpoint.name": checkpoint})


def _ended(way: _Way, outcome: str, reason: Any, at_s: float) -> CheckpointTrace | None:
    if way.uploading_s is None and outcome not in _ERRORS:
        return None  # found in the store, or downloaded from it: this process did nothing for it
    parts = way.parts(at_s)
    whole = Span("checkpoint", parts[0].begin_s, at_s)
    error = str(reason or outcome) if outcome in _ERRORS else None
    return CheckpointTrace(whole, tuple(parts), way.attributes | {"checkpoint.outcome": outcome}, error)
