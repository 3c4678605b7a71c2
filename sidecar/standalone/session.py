"""Access to one store without a daemon: the settings and credentials of the sidecar, and patience that ends."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from sidecar.daemon.settings import Settings, from_environment
from sidecar.store.opening import open_anywhere
from sidecar.store.protocol import Capabilities, Store
from sidecar.transfer.executor import StoreExecutor, awaited
from sidecar.transfer.health import Health
from sidecar.transfer.rate_gate import RateGate

T = TypeVar("T")
Happened = Callable[..., object]
"""Records an event by its name and fields."""
OnBytes = Callable[[str, int, int], None]
"""Shows progress: called with the checkpoint, the bytes that are compared, sent or there, and all bytes."""

PATIENCE_S = 20.0
"""Seconds for which a failing request is retried: a person waits for the answer."""
UNPROBED_ROUND_TRIP_S = 0.02
"""Round trip that is assumed for a bucket: only a command that writes measures it."""


@dataclass(frozen=True, slots=True)
class StoreSession:
    """An opened store, and the threads of its requests."""

    url: str
    """The prefix, as the person gave it."""
    settings: Settings
    store: Store
    executor: StoreExecutor

    async def probe(self) -> Capabilities:
        """Return the store's capabilities. Writes and deletes objects below ``.ckpt-probe/``.

        Raises:
            AccessRefused, StoreUnavailable: As the store's ``probe``.
        """
        capabilities = await self.executor.once(self.store.probe)
        self.executor.set_round_trip(capabilities.round_trip_s)
        return capabilities

    @property
    def is_remote(self) -> bool:
        """Whether the store is reached over a network."""
        return not self.url.startswith("file://")


@asynccontextmanager
async def opened(url: str, *, happened: Happened = lambda _, **__: None) -> AsyncIterator[StoreSession]:
    """Open a store by the settings of the environment but ``CKPT_STORE``, as the sidecar does; close it at the end.

    ``happened``: called when the store does not answer, and when it answers again.

    Raises:
        ConfigurationError: The address or a setting is not valid.
    """
    settings = from_environment({**os.environ, "CKPT_STORE": url}, hostname=socket.gethostname())
    store = open_anywhere(settings)
    executor = StoreExecutor(
        concurrency=settings.concurrency,
        gate=RateGate(settings.bandwidth_limit),
        health=Health(happened),
        part_bytes=settings.part_size,
        patience_s=PATIENCE_S,
    )
    if not url.startswith("file://"):
        executor.set_round_trip(UNPROBED_ROUND_TRIP_S)
    try:
        with awaited():
            yield StoreSession(url, settings, store, executor)
    finally:
        executor.close()
        store.close()


def run(url: str, work: Callable[[StoreSession], Awaitable[T]], *, happened: Happened = lambda _, **__: None) -> T:
    """Open a store, do the work, and return its result. Raises as ``opened`` and the work do."""

    async def life() -> T:
        async with opened(url, happened=happened) as session:
            return await work(session)

    return asyncio.run(life())
