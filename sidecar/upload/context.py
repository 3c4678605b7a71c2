"""What all uploads share: the store and its limits, the threads, the catalog, the flush, and who is asked about the pod."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from sidecar.catalog.catalog import Catalog, Tracked
from sidecar.core.schedule.parts import max_parts_after_refusal
from sidecar.store.protocol import Capabilities, Store
from sidecar.transfer.clock import Clock
from sidecar.transfer.executor import StoreExecutor
from sidecar.upload.commit.committer import Committer
from sidecar.upload.commit.existing_commit import Quarantine
from sidecar.upload.commit.overwrite_guard import OverwriteGuard
from sidecar.upload.commit.reuploads import Reuploads
from sidecar.upload.schedule.flush_control import FlushControl
from sidecar.upload.schedule.retry_waits import RetryWaits
from sidecar.upload.send.deduplicate import Deduplicator
from sidecar.upload.send.file_transfer import FileTransfer
from sidecar.upload.send.journal import Journal
from sidecar.upload.send.payloads import Payloads, Source
from trainer_hook.contract import Node


class PodState(Protocol):
    """The pod and its trainer, as uploads ask about them."""

    def left_s(self) -> float | None:
        """Return the seconds until the deadline of the flush, or ``None`` while the pod stays."""
        ...

    def trainer_alive(self) -> bool:
        """Whether a training process still runs."""
        ...

    def attempt(self) -> str:
        """Return the id of the attempt that the trainer makes now."""
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
        guard: OverwriteGuard,
        on_sent_in_vain: Callable[[], None],
        tracked: Tracked | None = None,
    ) -> FileTransfer:
        """Return what carries the files of a checkpoint.

        Args:
            name: Of the checkpoint.
            source: Its files.
            journal: What is in the store already.
            guard: Passed before each request that writes.
            on_sent_in_vain: Called when a file turns out to be another one than what was sent of it early.
            tracked: Where to say how much arrived; ``None``: nowhere.
        """
        arrived = self.flush.progressed(name)

        def progressed(sent_bytes: int) -> None:
            arrived(sent_bytes)
            if tracked is not None:
                tracked.sent_bytes = sent_bytes

        transfer = FileTransfer(
            name=name,
            payloads=self.payloads(name, source),
            store=self.store,
            capabilities=self.limits.known,
            executor=self.executor,
            journal=journal,
            deduplicator=self.deduplicator,
            guard=guard.pass_through,
            on_progress=progressed,
            on_change=self.news.set,
            on_sent_in_vain=on_sent_in_vain,
            on_part_refused=self.limits.part_refused,
        )
        arrived(transfer.sent_bytes())  # what came before is not counted
        return transfer
