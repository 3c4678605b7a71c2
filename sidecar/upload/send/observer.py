"""Notifications of a transfer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def ignore(*_: object) -> None:
    """Take no note."""


@dataclass(frozen=True, slots=True)
class TransferObserver:
    """Functions that a transfer calls from the event loop; by default they do nothing."""

    progressed: Callable[[int, int], object] = ignore
    """Called with the number of bytes that have just arrived in the store, and with the number of all bytes of the checkpoint
    there, which is smaller than before if a file is sent again."""
    changed: Callable[[], object] = ignore
    """Called on a change that may affect the order of uploads."""
    sent_wrong_bytes: Callable[[], object] = ignore
    """Called when a file differs from its early upload."""
    part_refused: Callable[[int], object] = ignore
    """Called with the number of a part that the store refused by its number."""
