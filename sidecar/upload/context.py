"""Objects that all uploads share: store and limits, executor, catalog, flush control, the pod and its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import structlog

from sidecar.catalog.catalog import Catalog, Tracked
from sidecar.core.schedule.parts import max_parts_after_refusal
from sidecar.lifecycle.deadline import Deadline
from sidecar.lifecycle.lease import Lease
from sidecar.lifecycle.pod import UploadingPod
from sidecar.store.protocol import Capabilities, Store
from sidecar.transfer.clock import Clock
from sidecar.transfer.executor import StoreExecutor
from sidecar.upload.commit.committer import Committer
from sidecar.upload.commit.existing_commit import KnownDamage
from sidecar.upload.commit.reuploads import Reuploads
from sidecar.upload.schedule.flush_control import FlushControl
from sidecar.upload.schedule.retry_waits import DEFECT_HINT, RetryWaits
from sidecar.upload.send.deduplicate import Deduplicator
from sidecar.upload.send.file_transfer import FileTransfer
from sidecar.upload.send.first_writes import WriteGuard
from sidecar.upload.send.journal import Journal
from sidecar.upload.send.observer import TransferObserver
from sidecar.upload.send.payloads import Payloads, Source
from sidecar.upload.send.store_link import SharedPaths, StoreLink
from trainer_hook.contract import Node

log = structlog.get_logger()


class StoreLimits:
    """Known capabilities of the store. The maximum number of parts may turn out to be lower than declared."""

    def __init__(self, capabilities: Capabilities) -> None:
        self.known = capabilities

    def part_refused(self, number: int) -> None:
        """Lower the maximum number of parts after the store refused part ``number``. It applies to new multipart uploads."""
        self.known = replace(self.known, max_parts=max_parts_after_refusal(number, max_parts=self.known.max_parts))


@dataclass(frozen=True)
class UploadContext:
    """Shared objects of all uploads. Created once the store was reached."""

    store: Store
    limits: StoreLimits
    executor: StoreExecutor
    committer: Committer
    catalog: Catalog
    flush: FlushControl
    pod: UploadingPod
    deadline: Deadline
    lease: Lease
    quarantine: KnownDamage
    clock: Clock = field(default_factory=Clock)
    deduplicator: Deduplicator = field(default_factory=Deduplicator)
    retry_waits: RetryWaits = field(default_factory=RetryWaits)
    reuploads: Reuploads = field(default_factory=Reuploads)
    shared_paths: SharedPaths = field(default_factory=SharedPaths)
    raises_defects: bool = False
    """An exception that nothing expects ends all uploads, not only that of one checkpoint: a simulation has to see it."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set on each change that may affect the order of uploads."""

    def report_defect(self, name: str, error: Exception) -> None:
        """Report an exception that nothing expects. It must not keep the other checkpoints from the store."""
        if self.raises_defects:
            raise error
        log.error("upload_defect", checkpoint=name, hint=DEFECT_HINT, exc_info=error)

    def payloads(self, name: str, source: Source) -> Payloads:
        """Return the reader of a checkpoint's files, which pauses while another upload has priority."""
        return Payloads(
            name=name, source=source, store=self.store, capabilities=self.limits.known, gate=self.flush.pause_gate(name)
        )

    def transfer(
        self,
        name: str,
        source: Source,
        journal: Journal,
        *,
        guard: WriteGuard,
        on_wrong: Callable[[], object],
        tracked: Tracked | None = None,
        node: Node | None = None,
    ) -> FileTransfer:
        """Return a transfer of the files of a checkpoint.

        Args:
            name: Name of the checkpoint.
            source: Its files.
            journal: Record of the files and parts in the store.
            guard: Passed before each request that writes.
            on_wrong: Called when a file differs from its early upload.
            tracked: Receives the number of confirmed bytes; ``None``: it is not reported.
            node: Node of the checkpoint; ``None``: not known yet.
        """
        if node is not None:
            self.shared_paths.has_other_nodes = node.count > 1

        def progressed(arrived_bytes: int, sent_bytes: int) -> None:
            self.flush.arrived(name, arrived_bytes)
            if tracked is not None:
                tracked.set_sent_bytes(sent_bytes)

        return FileTransfer(
            name,
            StoreLink(self.store, self.limits.known, self.executor, self.deduplicator, self.shared_paths),
            payloads=self.payloads(name, source),
            journal=journal,
            guard=guard,
            observer=TransferObserver(progressed, self.news.set, on_wrong, self.limits.part_refused),
        )
