"""Notifications of a transfer."""

from __future__ import annotations


class TransferObserver:
    """Observer of a transfer; this one ignores all notifications. All methods are called from the event loop."""

    def progressed(self, arrived_bytes: int, *, sent_bytes: int) -> None:
        """Take note of bytes that arrived in the store, or of a file that is sent again.

        Args:
            arrived_bytes: Number of those that this transfer has just sent.
            sent_bytes: Number of bytes of the checkpoint in the store; smaller than before if a file is sent again.
        """

    def changed(self) -> None:
        """Take note of a change that may affect the order of uploads."""

    def sent_wrong_bytes(self) -> None:
        """Take note that a file differs from its early upload."""

    def part_refused(self, number: int) -> None:
        """Take note that the store refused a part by its number."""
