"""What all uploads share: the store and its limits, the threads, the catalog, the flush, and who is asked about the pod."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Protocol

from sidecar.catalog.catalog import Catalog, Tracked
from sidecar.core.schedule.parts import max_parts_after_refusal
from sidecar.lifecycle.pod import PodState
from sidecar.store.protocol import Capabilities, Store
from sidecar.transfer.clock import Clock
from sidecar.transfer.executor import StoreExecutor
from sidecar.upload.commit.committer import Committer
from sidecar.upload.commit.existing_commit import Quarantine
from sidecar.upload.commit.reuploads import Reuploads
from sidecar.upload.schedule.flush_control import FlushControl
from sidecar.upload.schedule.retry_waits import RetryWaits
from sidecar.upload.send.deduplicate import Deduplicator
from sidecar.upload.send.file_transfer import FileTransfer, TransferObserver, WriteGuard
from sidecar.upload.send.journal import Journal
from sidecar.upload.send.payloads import Payloads, Source
from sidecar.upload.send.store_link import StoreLink
from trainer_hook.contract import Node


class EarlySending(Protocol):
    """Files that are sent before their checkpoint is finished."""

    def wait_for_closing(self) -> None:
        """Send only closed files from now on."""
        ...


class Lease(Protocol):
    """The right to write below the prefix."""

    async def objection(self, node: Node | None, attempt: str) -> str | None:
        """Return why a checkpoint of an attempt must not be written yet, or ``None``.

        Args:
            node: Whose checkpoint it is; ``None``: this pod's.
            attempt: Of which attempt.

        Raises:
            StoreError: It cannot be known now.
        """
        ...


class StoreLimits:
    """What the store can do, as far as it is known: it may turn out to take fewer parts than it said."""

    def __init__(self, capabilities: Capabilities) -> None:
        self.known = capabilities

    def part_refused(self, number: int) -> None:
        """Send files that begin anew in fewer parts, where the refusal says that the store has a lower limit."""
        self.known = replace(self.known, max_parts=max_parts_after_refusal(number, max_parts=self.known.max_parts))


@dataclass(frozen=True)
class UploadContext:
    """Made once the store was reached. All uploads share one link, one set of threads, and what is known of files."""

    store: Store
    limits: StoreLimits
    executor: StoreExecutor
    committer: Committer
    catalog: Catalog
    flush: FlushControl
    pod: PodState
    lease: Lease
    quarantine: Quarantine
    clock: Clock = field(default_factory=Clock)
    deduplicator: Deduplicator = field(default_factory=Deduplicator)
    retry_waits: RetryWaits = field(default_factory=RetryWaits)
    reuploads: Reuploads = field(default_factory=Reuploads)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when something changed that may change the order of uploads."""

    def is_going(self) -> bool:
        """Whether the pod is going: a flush has a deadline."""
        return self.pod.left_s() is not None

    def payloads(self, name: str, source: Source) -> Payloads:
        """Return what reads the files of a checkpoint, and holds them while something else goes first."""
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
        early: EarlySending,
        tracked: Tracked | None = None,
    ) -> FileTransfer:
        """Return what carries the files of a checkpoint.

        Args:
            name: Of the checkpoint.
            source: Its files.
            journal: What is in the store already.
            guard: Passed before each request that writes.
            early: Told when a file turns out to be another one than what was sent of it early.
            tracked: Where to say how much arrived; ``None``: nowhere.
        """
        observer = _Observer(self, name, early, tracked)
        transfer = FileTransfer(
            name,
            StoreLink(self.store, self.limits.known, self.executor, self.deduplicator),
            payloads=self.payloads(name, source),
            journal=journal,
            guard=guard,
            observer=observer,
        )
        observer.arrived_bytes = transfer.sent_bytes()
        return transfer


class _Observer(TransferObserver):
    """Takes what happens to one transfer to the flush, the catalog and the queue."""

    def __init__(self, context: UploadContext, name: str, early: EarlySending, tracked: Tracked | None) -> None:
        self._context = context
        self._name = name
        self._early = early
        self._tracked = tracked
        self.arrived_bytes = 0
        """Bytes of the checkpoint in the store; those from before this transfer are not counted as progress of the flush."""

    def progressed(self, sent_bytes: int) -> None:
        self._context.flush.arrived(self._name, sent_bytes - self.arrived_bytes)
        self.arrived_bytes = sent_bytes
        if self._tracked is not None:
            self._tracked.sent_bytes = sent_bytes

    def changed(self) -> None:
        self._context.news.set()

    def sent_in_vain(self) -> None:
        self._early.wait_for_closing()

    def part_refused(self, number: int) -> None:
        self._context.limits.part_refused(number)
