"""What changes during a life of the sidecar. Only the daemon writes it; the API reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from sidecar.core.lifecycle.phases import Phase
from sidecar.store.protocol import Capabilities

T = TypeVar("T")


class DaemonState:
    """Phase, capabilities of the store, and the end."""

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.capabilities: Capabilities | None = None
        """Capabilities of the store; ``None`` until it was reached."""
        self.store_opened = asyncio.Event()
        """The store was reached, and uploads and downloads may begin."""
        self.ended = asyncio.Event()
        """The exit code is decided: calls of the API that still wait are answered."""

    async def unless_ended(self, waiting: Coroutine[Any, Any, T]) -> T | None:
        """Return what ``waiting`` returns, or ``None`` when the sidecar ends first."""
        task, end = asyncio.create_task(waiting), asyncio.create_task(self.ended.wait())
        try:
            await asyncio.wait({task, end}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            end.cancel()
