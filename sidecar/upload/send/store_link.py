"""The store as transfers use it: capabilities, executor, and files for deduplication."""

from __future__ import annotations

from dataclasses import dataclass, field

from sidecar.store.protocol import Capabilities, Store
from sidecar.transfer.executor import StoreExecutor
from sidecar.upload.send.deduplicate import Deduplicator


@dataclass(slots=True)
class SharedPaths:
    """Paths that several nodes of a job write, such as ``config.json``, as far as this process has found out."""

    has_other_nodes: bool = False
    paths: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class StoreLink:
    """Shared by all transfers that start while the capabilities are unchanged."""

    store: Store
    capabilities: Capabilities
    executor: StoreExecutor
    deduplicator: Deduplicator
    shared_paths: SharedPaths = field(default_factory=SharedPaths)
