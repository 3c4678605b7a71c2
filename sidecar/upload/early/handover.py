"""Handover of an early upload to the upload of the finished checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from sidecar.errors import SidecarError
from sidecar.upload.send.file_transfer import FileTransfer
from sidecar.upload.send.journal import Journal


@dataclass(frozen=True, slots=True)
class Handover:
    """State of an early upload when its checkpoint is finished."""

    journal: Journal
    """Record of its files and parts in the store; to be deleted when none is in flight."""
    transfer: FileTransfer | None = None
    """Transfer of the parts in flight; ``None``: there are none."""
    parts_in_flight: Mapping[str, set[int]] = field(default_factory=dict)
    """Numbers of the parts in flight, by path."""

    async def settle(self, own: FileTransfer) -> None:
        """Wait for the parts in flight, and pass their outcome to the checkpoint's own transfer."""
        if self.transfer is None:
            return
        with contextlib.suppress(SidecarError, OSError):
            await self.transfer.finished()
        try:
            own.settle(self.journal)
        except Exception as error:  # otherwise the transfer would wait for these parts without end
            own.fail(error)
