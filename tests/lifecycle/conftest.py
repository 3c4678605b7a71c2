"""A real folder as the store of leases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sidecar.catalog.events import Events
from sidecar.store.file.store import FileStore
from sidecar.transfer.executor import StoreExecutor
from sidecar.transfer.health import Health
from sidecar.transfer.rate_gate import RateGate


@pytest.fixture
async def executor() -> AsyncIterator[StoreExecutor]:
    executor = StoreExecutor(concurrency=2, gate=RateGate(None), health=Health(Events().happened))
    yield executor
    executor.close()


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    store = FileStore(tmp_path / "store")
    store.probe()
    return store
