"""The true order of a schedule's attempts, and what each of them may still do once a later one holds the prefix."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Protocol

from sidecar.core.format.attempts import goes_after
from sidecar.core.lifecycle import fencing
from sidecar.core.lifecycle.fencing import claims_among
from tests.simulation.job import reader


class Dated(Protocol):
    """A version of a step, or its commit."""

    @property
    def attempt(self) -> str: ...

    @property
    def created_at(self) -> str | None: ...


@dataclass
class AttemptOrder:
    """Attempts in the order in which they began."""

    names_job: bool
    """Whether the pods know the name of their job."""
    _began_s: dict[str, float] = field(default_factory=dict)
    _left_behind_s: dict[str, float] = field(default_factory=dict)
    """When the holder of a later attempt declared that, by attempt."""
    _claimed_s: dict[int, float] = field(default_factory=dict)
    """When each epoch of the prefix was claimed first."""
    _latest_claim: dict[str, int] = field(default_factory=dict)
    """Highest epoch that a pod of an attempt has claimed."""
    _held_s: dict[int, float] = field(default_factory=dict)
    """When the holder of each epoch wrote its first document."""
    _declared: dict[int, set[str]] = field(default_factory=dict)
    """Attempts that the holder of each epoch has declared."""

    def begins(self, attempt: str, at_s: float) -> None:
        """Take note of the next attempt. ``at_s``: start of its node 0."""
        self._began_s[attempt] = at_s

    def _is_later(self, attempt: str, other: str) -> bool:
        order = list(self._began_s)
        return attempt in order and (other not in order or order.index(attempt) > order.index(other))

    def counts_as_later(self, version: Dated, other: Dated) -> bool:
        """Whether a version of a step may replace one of another attempt.

        Attempts of a job whose name is known have an order, except those that began so closely that the one that claims later
        counts as the later one. Others are ordered by who held the prefix last, as any pod takes it over from a silent holder,
        or by their clocks.
        """
        if self.names_job:
            return self._may_claim_later(version.attempt, other.attempt)
        is_after = goes_after(version.attempt, version.created_at or "", other.attempt, other.created_at)
        return is_after or self._is_later(version.attempt, other.attempt) or self._held_later(version.attempt, other.attempt)

    def _held_later(self, attempt: str, other: str) -> bool:
        return self._latest_claim.get(attempt, 0) > self._latest_claim.get(other, 0)

    def _may_claim_later(self, attempt: str, other: str) -> bool:
        apart_s = self._began_s.get(other, math.inf) - self._began_s.get(attempt, 0.0)
        return self._is_later(attempt, other) or apart_s <= fencing.START_TOLERANCE_S

    def declared(self, run_json: bytes, *, now_s: float, is_stray: bool) -> None:
        """Note which attempts the holder has left behind: nothing of them is committed any more."""
        run = json.loads(run_json)
        attempts = [attempt for attempt in run.get("attempts", []) if attempt in self._began_s]
        self._held_s.setdefault(run.get("epoch", 0), now_s)
        self._declared.setdefault(run.get("epoch", 0), set()).update(attempts)
        for earlier in self._began_s:
            if earlier not in attempts and any(self._is_later(attempt, earlier) for attempt in attempts):
                self._left_behind_s.setdefault(earlier, now_s)
        for attempt in () if is_stray else attempts:
            # Without the job's name, any live pod may take over from a silent holder.
            others = [other for other in self._began_s if other != attempt]
            if not self.names_job or all(self._may_claim_later(attempt, other) for other in others):
                self._left_behind_s.pop(attempt, None)

    def written(self, key: str, attempt: str | None, *, now_s: float) -> None:
        """Take note of a claim among written objects. ``attempt``: that of the pod; ``None``: its request was late."""
        for claim in claims_among([(key, "")]):
            self._claimed_s.setdefault(claim.epoch, now_s)
            if attempt is not None:
                self._latest_claim[attempt] = max(claim.epoch, self._latest_claim.get(attempt, 0))

    def is_undeclared(self, attempt: str, *, read_s: float) -> bool:
        """Whether a node that read the document of the holder at that time saw one that has not declared an attempt."""
        latest = max((epoch for epoch, at_s in self._held_s.items() if at_s < read_s), default=0)
        return latest > 0 and attempt not in self._declared[latest]

    def why_too_late(self, commit: reader.Named, *, decided_s: float) -> str | None:
        """Return why a commit must not be written any more by a pod that looked at that time, or ``None``."""
        if self._left_behind_s.get(commit.attempt, math.inf) < decided_s:
            return f"{commit.attempt} is committed long after the next attempt was declared"
        epoch = math.inf if commit.epoch is None else commit.epoch
        later = [claimed for claimed, at_s in self._claimed_s.items() if at_s < decided_s and claimed > epoch]
        return f"a commit under epoch {epoch} long after epoch {max(later)} was claimed" if later else None
