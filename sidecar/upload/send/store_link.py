"""The store as transfers use it: what it can do, who runs its requests, and which files it has already."""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.store.protocol import Capabilities, Store
from sidecar.transfer.executor import StoreExecutor
from sidecar.upload.send.deduplicate import Deduplicator


@dataclass(frozen=True, slots=True)
class StoreLink:
    """Shared by all transfers that begin while the capabilities stay what they are."""

    store: Store
    capabilities: Capabilities
    executor: StoreExecutor
    deduplicator: Deduplicator
