"""The store as transfers use it: capabilities, executor, and files for deduplication."""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.store.protocol import Capabilities, Store
from sidecar.transfer.executor import StoreExecutor
from sidecar.upload.send.deduplicate import Deduplicator


@dataclass(frozen=True, slots=True)
class StoreLink:
    """Shared by all transfers that start while the capabilities are unchanged."""

    store: Store
    capabilities: Capabilities
    executor: StoreExecutor
    deduplicator: Deduplicator
