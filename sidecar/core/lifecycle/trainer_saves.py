"""Whether the trainer's saves fail, as its hook tells it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Told:
    """What one trainer told last."""

    attempt: str | None
    pid: int | None
    error: str | None
    """Why its latest save failed; ``None``: it succeeded, or none was tried."""


class News(StrEnum):
    """What is logged, by the name of the event."""

    FAIL = "trainer_saves_fail"
    AGAIN = "trainer_saves_again"


def news(before: Told | None, now: Told) -> News | None:
    """Return the event to log as the trainer's report changes from ``before`` (``None``: the first one); ``None``: none.

    A trainer that starts anew has not saved yet: that it reports no failure says nothing.
    """
    is_same = before is not None and (before.attempt, before.pid) == (now.attempt, now.pid)
    failed_before = before is not None and is_same and before.error is not None
    if failed_before == (now.error is not None):
        return None
    return News.FAIL if now.error is not None else News.AGAIN
