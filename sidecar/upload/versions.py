"""Finished versions of checkpoints on this pod: their files, their journals, and their transfer to the store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from sidecar.catalog.scanner import Scanner
from sidecar.core.format import keys
from sidecar.core.format.found_checkpoint import Finished
from sidecar.core.format.manifest import FileEntry
from sidecar.upload.commit.existing_commit import Contents
from sidecar.upload.commit.overwrite_guard import OverwriteGuard
from sidecar.upload.context import UploadContext
from sidecar.upload.early.early_upload import EarlyUploads
from sidecar.upload.early.handover import Handover
from sidecar.upload.schedule.queue import Active, report_uploading
from sidecar.upload.send.journal import Journal
from sidecar.upload.send.observer import ignore
from sidecar.upload.send.payloads import Source
from sidecar.volume.opener import Place
from sidecar.volume.pins import held_as
from sidecar.volume.volume import Volume


@dataclass(frozen=True, slots=True)
class Held:
    """Files of one version, held until it is durable."""

    source: Source
    contents: Contents


@dataclass(frozen=True, slots=True)
class Sent:
    """Files and parts of one version that were sent before this upload."""

    journal: Journal
    early: Handover
    """The early upload that was taken over; some of its parts may still be in flight."""
    on_wrong: Callable[[], object] = ignore
    """Called when a file differs from its early upload."""


class Versions(Protocol):
    """Where an upload finds a version: on the volume of a pod, or in a directory that a person pushes, which has no links.

    The simulation implements it without files and threads.
    """

    async def hold(self, checkpoint: Finished) -> Held:
        """Hold the files of a checkpoint. Idempotent.

        Raises:
            CheckpointRejected: They were deleted.
            OSError: The volume failed.
        """
        ...

    def taken_over(self, active: Active, checkpoint: Finished) -> AbstractAsyncContextManager[Sent]:
        """Yield the journal of a checkpoint, with the early upload merged into it."""
        ...

    async def send(
        self, active: Active, checkpoint: Finished, held: Held, sent: Sent, guard: OverwriteGuard
    ) -> list[FileEntry]:
        """Send the missing files and parts; return the entries of all files, incomplete if the upload was closed meanwhile.

        Raises:
            CheckpointChanged, CheckpointRejected: Its files differ from the finished ones.
            Outdated: Another version of the step was committed.
            StoreError: A file could not be sent.
        """
        ...

    async def journal(self, checkpoint: Finished) -> Journal:
        """Return the journal: the files and parts of a checkpoint that are in the store."""
        ...

    def let_go(self, checkpoint: Finished) -> None:
        """Release the files, and delete the journal."""
        ...

    def has_no_marker(self, name: str) -> bool:
        """Whether a checkpoint's marker was removed; False if the volume cannot be read now."""
        ...

    def examine_again(self, name: str) -> None:
        """Examine a checkpoint's directory again, as if it were new."""
        ...


def own_folder_keys(checkpoint: Finished, journal: Journal) -> dict[str, str]:
    """Return the keys of the files that an earlier process sent to this node's own folder (I6), by path.

    Under the shared key they would overwrite the file of another node, which would have to be sent again.
    """
    sent = {path: progress.key for path, progress in journal.uploads.copy().items()}
    sent |= {path: entry.key for path, entry in journal.entries.copy().items()}
    own = {path: keys.node_file(checkpoint.name, checkpoint.attempt, checkpoint.node, path) for path in sent}
    return {path: key for path, key in sent.items() if key == own[path]}


async def send_files(
    context: UploadContext, active: Active, checkpoint: Finished, held: Held, sent: Sent, guard: OverwriteGuard
) -> list[FileEntry]:
    """Do as ``Versions.send``, by work items that a dispatcher takes."""
    transfer = context.transfer(
        checkpoint.name,
        held.source,
        sent.journal,
        guard=guard,
        on_wrong=sent.on_wrong,
        tracked=active.tracked,
        node=checkpoint.node,
    )
    report_uploading(context.catalog, active.tracked, transfer)
    moved = own_folder_keys(checkpoint, sent.journal) | dict(context.reuploads.moved(checkpoint.version))
    transfer.add(checkpoint.files, moved=moved, awaited=sent.early.parts_in_flight)
    late = asyncio.create_task(sent.early.settle(transfer))
    active.transfer, active.is_handed_over = transfer, False
    context.news.set()
    try:
        return await transfer.finished()
    finally:
        late.cancel()
        active.transfer, active.is_sent = None, True
        context.news.set()


class VolumeVersions:
    """Versions that the trainer finished on the volume: held by links, and perhaps begun by an early upload."""

    def __init__(self, context: UploadContext, volume: Volume, scanner: Scanner, early: EarlyUploads) -> None:
        self._context = context
        self._volume = volume
        self._scanner = scanner
        self._early = early

    async def hold(self, checkpoint: Finished) -> Held:
        """As ``Versions``: by hard links, if the file system allows them."""
        pin = await asyncio.to_thread(self._volume.pins.hold, checkpoint)
        return Held(pin, self._context.payloads(checkpoint.name, pin))

    @contextlib.asynccontextmanager
    async def taken_over(self, active: Active, checkpoint: Finished) -> AsyncIterator[Sent]:
        """As ``Versions``. Early multipart uploads of files that are not the finished ones are aborted."""
        context = self._context
        active.is_handed_over = self._early.has(checkpoint.name)
        early = await self._early.hand_over(checkpoint.name)
        try:
            with contextlib.closing(await self.journal(checkpoint)) as journal:
                for stale in journal.take_over(early.journal, checkpoint.files):
                    await context.executor.persistently(context.store.abort_upload, stale.key, stale.upload_id)
                if early.transfer is None:  # otherwise its parts in flight are still recorded there
                    early.journal.delete()
                yield Sent(journal, early, self._early.send_closed_only)
        finally:
            active.is_handed_over = False
            early.journal.delete()

    async def send(
        self, active: Active, checkpoint: Finished, held: Held, sent: Sent, guard: OverwriteGuard
    ) -> list[FileEntry]:
        """As ``Versions``."""
        return await send_files(self._context, active, checkpoint, held, sent, guard)

    async def journal(self, checkpoint: Finished) -> Journal:
        """As ``Versions``: read from the state directory."""
        return await asyncio.to_thread(Journal, self._journal_of(checkpoint))

    def let_go(self, checkpoint: Finished) -> None:
        """As ``Versions``. The links are removed in a thread: where the trainer has deleted the files, theirs are the last."""
        links = self._volume.pins.set_aside(checkpoint)
        asyncio.get_running_loop().run_in_executor(None, self._volume.pins.remove, links)
        self._journal_of(checkpoint).discard()

    def has_no_marker(self, name: str) -> bool:
        """As ``Versions``."""
        try:
            return self._volume.read_marker_version(name) is None
        except OSError:  # the volume failed: the marker is read again later
            return False

    def examine_again(self, name: str) -> None:
        """As ``Versions``: at the next scan."""
        self._scanner.examine_again(name)

    def _journal_of(self, checkpoint: Finished) -> Place:
        return self._volume.journal / f"{held_as(checkpoint.name, checkpoint.version)}.jsonl"
