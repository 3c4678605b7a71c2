"""Finished versions of checkpoints on this pod: their files, what was sent of them, and the way to the store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from sidecar.catalog.scanner import Scanner
from sidecar.core.format.found_checkpoint import Finished
from sidecar.core.format.manifest import FileEntry
from sidecar.upload.commit.existing_commit import Contents
from sidecar.upload.commit.overwrite_guard import OverwriteGuard
from sidecar.upload.context import UploadContext
from sidecar.upload.early.early_upload import EarlyUploads, HandedOver
from sidecar.upload.schedule.queue import Active, say_uploading
from sidecar.upload.send.journal import Journal
from sidecar.upload.send.payloads import Source
from sidecar.volume.opener import Place
from sidecar.volume.pins import held_as
from sidecar.volume.volume import Volume


@dataclass(frozen=True, slots=True)
class Held:
    """The files of one version, held until it is durable."""

    source: Source
    contents: Contents


@dataclass(frozen=True, slots=True)
class Sent:
    """What was sent of one version before."""

    journal: Journal
    early: HandedOver
    """Of that, what may still be on its way."""


class Versions(Protocol):
    """What an upload needs of the pod that it runs in. The simulation has one without volume and threads."""

    async def hold(self, checkpoint: Finished) -> Held:
        """Hold the files of a checkpoint. Doing it again is harmless.

        Raises:
            CheckpointRejected: They are gone.
            OSError: The volume is in trouble.
        """
        ...

    def taken_over(self, active: Active, checkpoint: Finished) -> AbstractAsyncContextManager[Sent]:
        """Yield what is known to be in the store of a checkpoint, with what was sent of it early."""
        ...

    async def send(
        self, active: Active, checkpoint: Finished, held: Held, sent: Sent, guard: OverwriteGuard
    ) -> list[FileEntry]:
        """Send what is missing; return the entries of all files, or some where the checkpoint is not wanted any more.

        Raises:
            CheckpointChanged, CheckpointRejected: Its files are not what was finished.
            Outdated: Another writing of the step was committed.
            StoreError: Why a file could not be sent.
        """
        ...

    async def journal(self, checkpoint: Finished) -> Journal:
        """Return what is known to be in the store of a checkpoint."""
        ...

    def let_go(self, checkpoint: Finished) -> None:
        """Hold the files no longer, and forget what was sent."""
        ...

    def has_no_marker(self, name: str) -> bool:
        """Whether a checkpoint's marker was removed; false while that cannot be known."""
        ...

    def examine_again(self, name: str) -> None:
        """Have a checkpoint's directory looked at as if it were new."""
        ...


class VolumeVersions:
    """Those on the volume, sent by the dispatcher."""

    def __init__(self, context: UploadContext, volume: Volume, scanner: Scanner, early: EarlyUploads) -> None:
        self._context = context
        self._volume = volume
        self._scanner = scanner
        self._early = early

    async def hold(self, checkpoint: Finished) -> Held:
        """As ``Versions``: with hard links where they can be made."""
        pin = await asyncio.to_thread(self._volume.pins.hold, checkpoint)
        return Held(pin, self._context.payloads(checkpoint.name, pin))

    @contextlib.asynccontextmanager
    async def taken_over(self, active: Active, checkpoint: Finished) -> AsyncIterator[Sent]:
        """As ``Versions``. What was sent of other files than the finished ones is aborted."""
        context = self._context
        active.hands_over = self._early.has(checkpoint.name)
        early = await self._early.hand_over(checkpoint.name)
        try:
            with contextlib.closing(await self.journal(checkpoint)) as journal:
                for stale in journal.take_over(early.journal, checkpoint.files):
                    await context.executor.persistently(context.store.abort_upload, stale.key, stale.upload_id)
                if early.transfer is None:  # else it is told yet what arrives
                    early.journal.delete()
                yield Sent(journal, early)
        finally:
            active.hands_over = False
            early.journal.delete()

    async def send(
        self, active: Active, checkpoint: Finished, held: Held, sent: Sent, guard: OverwriteGuard
    ) -> list[FileEntry]:
        """As ``Versions``: by work items that the dispatcher takes, in the order of the queue."""
        context = self._context
        transfer = context.transfer(
            checkpoint.name,
            held.source,
            sent.journal,
            guard=guard,
            early=self._early,
            tracked=active.tracked,
        )
        say_uploading(context.catalog, active.tracked, transfer)
        moved = context.reuploads.moved(checkpoint.version)
        transfer.add(checkpoint.files, moved=moved, awaited=sent.early.on_the_way)
        late = asyncio.create_task(sent.early.settle(transfer))
        active.transfer, active.hands_over = transfer, False
        context.news.set()
        try:
            return await transfer.finished()
        finally:
            late.cancel()
            active.transfer, active.is_sent = None, True
            context.news.set()

    async def journal(self, checkpoint: Finished) -> Journal:
        """As ``Versions``: read from the state directory."""
        return await asyncio.to_thread(Journal, self._journal_of(checkpoint))

    def let_go(self, checkpoint: Finished) -> None:
        """As ``Versions``."""
        self._volume.pins.release(checkpoint)
        self._journal_of(checkpoint).discard()

    def has_no_marker(self, name: str) -> bool:
        """As ``Versions``."""
        try:
            return self._volume.look_at_marker(name) is None
        except OSError:  # the volume is in trouble: it is looked at again
            return False

    def examine_again(self, name: str) -> None:
        """As ``Versions``: at the next scan."""
        self._scanner.examine_again(name)

    def _journal_of(self, checkpoint: Finished) -> Place:
        return self._volume.journal / f"{held_as(checkpoint.name, checkpoint.version)}.jsonl"
