"""Notifications of a transfer."""

from __future__ import annotations


class TransferObserver:
    """Observer of a transfer; this one ignores all notifications. All methods are called from the event loop."""

    def progressed(self, sent_bytes: int) -> None:
        """Take the number of bytes of the checkpoint in the store."""

    def changed(self) -> None:
        """Take note of a change that may affect the order of uploads."""

    def sent_wrong_bytes(self) -> None:
        """Take note that a file differs from its early upload."""

    def part_refused(self, number: int) -> None:
        """Take note that the store refused a part by its number."""
