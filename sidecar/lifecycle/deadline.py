"""Deadline of the pod: whether the pod is terminating, and how long is left."""

from __future__ import annotations

import time

from sidecar.core.lifecycle.phases import margin_s


class Deadline:
    """Set by ``Termination`` at a notice. The daemon, uploads and the lease ask; while it is not set, the pod stays."""

    def __init__(self, *, grace_s: float = 0.0) -> None:
        """Start without a notice. ``grace_s``: grace period, of which a margin is reserved for the end."""
        self._margin_s = margin_s(grace_s)
        self._kill_at_s: float | None = None

    def set(self, kill_at_s: float) -> None:
        """Take the end of a grace period, monotonic seconds. Of several, the earliest counts."""
        self._kill_at_s = kill_at_s if self._kill_at_s is None else min(self._kill_at_s, kill_at_s)

    def clear(self) -> None:
        """Forget the notice: it was withdrawn."""
        self._kill_at_s = None

    def is_set(self) -> bool:
        """Whether there is a termination notice."""
        return self.left_s() is not None

    def left_s(self) -> float | None:
        """Return the seconds until the deadline; ``None``: no termination notice."""
        kill_in_s = self.kill_in_s()
        return None if kill_in_s is None else kill_in_s - self._margin_s

    def is_within(self, seconds: float) -> bool:
        """Whether less than ``seconds`` are left; 0: the deadline has passed."""
        left_s = self.left_s()
        return left_s is not None and left_s < seconds

    def kill_in_s(self) -> float | None:
        """Return the seconds until the end of the grace period; ``None``: no termination notice."""
        return None if self._kill_at_s is None else self._kill_at_s - time.monotonic()
