"""State of the store at one instant, from what it has answered and what it has not: what "safe" may rest on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

LATE_S = 3.0
"""Seconds beyond its usual time after which a small request is late."""
WRITE_LATE_S = 10.0
"""Seconds without a sent byte and without an answer after which uploads are late: a store needs time to join large parts."""
SILENT_S = 30.0
"""Most seconds without an answer before the store counts as silent; the grace period, if that is shorter."""
ASK_IDLE_S = 30.0
"""Most seconds between two answers while nothing is under way; half of the grace period, if that is shorter."""
ASK_BUSY_S = 3.0
"""Seconds without an answer to anything under way after which the store is asked."""
LEAST_ASK_S = 1.0


class StoreState(StrEnum):
    """Whether what the trainer saves now would become durable."""

    ANSWERS = "answers"
    UNKNOWN = "unknown"
    """The latest answer is older than the grace period, or a request is late."""
    SILENT = "silent"
    """A small request has waited too long for its answer."""
    AWAY = "away"
    """The latest request failed."""
    REFUSES = "refuses"
    """It answers, and refuses what is uploaded."""
    FULL = "full"

    @property
    def is_usable(self) -> bool:
        """Whether nothing shows that uploads do not work now."""
        return self in (StoreState.ANSWERS, StoreState.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of the store at one instant."""

    answered_ago_s: float | None
    """Seconds since it last answered a request; ``None``: never."""
    asked_ago_s: float | None = None
    """Seconds for which a small request has waited for its answer; ``None``: none is under way."""
    usual_s: float = 0.0
    """Usual seconds of such a request."""
    still_ago_s: float = 0.0
    """Seconds for which uploads have neither sent a byte nor got an answer; 0: none is under way."""
    failure: str | None = None
    """Text of the latest failure; ``None``: a request has succeeded since."""
    is_full: bool = False
    refuses_uploads: bool = False
    """An upload was refused again although other requests were answered, and none has succeeded since."""


def store_state(known: Evidence, *, grace_s: float) -> StoreState:
    """Return the state. ``ANSWERS`` needs an answer that is younger than the grace period, and no late request."""
    if known.is_full:
        return StoreState.FULL
    if known.failure is not None:
        return StoreState.AWAY
    if known.refuses_uploads:
        return StoreState.REFUSES
    late_s = 0.0 if known.asked_ago_s is None else known.asked_ago_s - known.usual_s
    if late_s > max(LATE_S, min(SILENT_S, grace_s)):
        return StoreState.SILENT
    is_old = known.answered_ago_s is None or known.answered_ago_s > grace_s
    return StoreState.UNKNOWN if is_old or late_s > LATE_S or known.still_ago_s > WRITE_LATE_S else StoreState.ANSWERS


def ask_in_s(known: Evidence, *, is_busy: bool, grace_s: float) -> float:
    """Return the seconds until the store should be asked (0: now). The evidence never gets as old as the grace period.

    ``is_busy``: a request is under way, which may be late.
    """
    if known.answered_ago_s is None:
        return 0.0
    most_s = ASK_BUSY_S if is_busy else ASK_IDLE_S
    return max(0.0, max(LEAST_ASK_S, min(most_s, grace_s / 2)) - known.answered_ago_s)
