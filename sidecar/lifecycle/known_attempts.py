"""Attempts of a job of several nodes, as one pod knows them: which are declared, under which epoch, and in which order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sidecar.core.format.attempts import Seen, began_after
from sidecar.core.lifecycle.prefix_ownership import Run, awaits_declaration, with_attempt
from sidecar.lifecycle.pod import LeasedPod


class KnownAttempts:
    """Attempts that node 0 has declared, as far as this pod has read or written them."""

    def __init__(self, pod: LeasedPod, found_in: Mapping[str, int]) -> None:
        """Start without any. ``found_in``: scan that found each attempt first."""
        self._pod = pod
        self._found_in = found_in
        self.epochs: dict[str, int] = {}
        """Epochs of the attempts that are known to be declared by the holder."""
        self.declared: tuple[str, ...] = ()
        """Attempts that this pod, as the holder, has declared its own: a late write of an earlier pod may hide them."""

    def take_over(self, run: Run) -> Run:
        """Return the run of another holder with the attempts that this pod declares as the next one."""
        run = replace(run, attempts=())
        for attempt in self.epochs:
            run = self.declare(run, attempt)
        return run

    def declare(self, run: Run, attempt: str) -> Run:
        """Return the run with an attempt that this pod, as the holder, declares its own."""
        return with_attempt(run, attempt, self._seen())

    def later_attempt_than(self, attempt: str) -> str | None:
        """Return a later declared attempt of this node, for which it has left an attempt that was never declared."""
        seen = self._seen()
        return next((known for known in self.epochs if began_after(known, attempt, seen)), None)

    def _seen(self) -> Seen:
        return Seen(self._pod.present_attempt(), self._found_in)

    def awaits_declaration(self, run: Run, attempt: str, *, claimed_epoch: int = 0) -> str | None:
        """Do as ``prefix_ownership.awaits_declaration``, with what this pod knows of the attempt."""
        known_epoch, has_later = self.epochs.get(attempt), self.later_attempt_than(attempt) is not None
        return awaits_declaration(
            run, claimed_epoch=claimed_epoch, attempt=attempt, known_epoch=known_epoch, has_later=has_later
        )
