"""What an ended sidecar's termination message says first, written and read by one rule."""

from __future__ import annotations

import re
from dataclasses import dataclass

ALL_DURABLE = "everything finished is durable"
_DURABLE_STEP = "newest durable step: "


@dataclass(frozen=True, slots=True)
class Ending:
    """What a message says. ``None``: nothing."""

    all_durable: bool
    durable_step: int | None


def durable_step_text(step: int | None) -> str:
    """Return how a message names the newest durable step."""
    return f"{_DURABLE_STEP}{step}"


def ending_of(message: str) -> Ending:
    """Return what a termination message says; of any other text, nothing."""
    found = re.search(rf"{_DURABLE_STEP}([0-9]{{1,18}})\b", message, re.ASCII)
    return Ending(message.startswith(ALL_DURABLE), int(found[1]) if found else None)
