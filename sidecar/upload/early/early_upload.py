"""Early upload: sends files of checkpoints that the trainer still writes, so that little is left to send after the marker.

Closed files are sent completely, growing files up to their size at an earlier poll. Once the marker exists, each file is
compared with its early upload by its checksum. Nothing is sent early if another attempt may need objects of the step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from sidecar.core.format.found_checkpoint import FoundFile
from sidecar.core.format.key_limits import impossible_key
from sidecar.core.lifecycle.states import PENDING, WANTED
from sidecar.core.schedule.order import Waiting
from sidecar.errors import Fenced, SidecarError, StoreError
from sidecar.tasks import task_group, within
from sidecar.upload.commit.overwrite_guard import OverwriteGuard
from sidecar.upload.context import UploadContext
from sidecar.upload.early.handover import Handover
from sidecar.upload.schedule.flush_control import Writing
from sidecar.upload.send.file_transfer import FileTransfer
from sidecar.upload.send.journal import Journal
from sidecar.volume.unfinished import FilesSeen, Unfinished, list_files
from sidecar.volume.volume import Volume
from sidecar.volume.walk import newest_mtime
from sidecar.volume.watch import Hints
from trainer_hook.contract import FINAL, Node, step_of

log = structlog.get_logger()

POLL_S = 0.5
"""Poll interval of the directories in seconds."""
FLUSH_POLL_S = 0.05
"""Poll interval in seconds after a termination notice."""
PAUSE_FACTOR = 10
"""Minimum pause between two polls, as a multiple of the duration of a poll: a walk of thousands of files takes long."""
LEAST_BYTES = 8 << 20
"""Minimum bytes for the start of an early upload: with fewer, the marker is likely to come first."""
BACKOFF_S = 5.0
"""Backoff in seconds of a directory after one of its files changed during its upload, or the store failed."""

ABANDONED_S = 2.0
"""Seconds without a write after which a directory counts as abandoned, if no trainer is alive."""
FRESH_S = 60.0
"""Seconds without a write after which a directory counts as a remnant of an earlier trainer process."""

CLEANUP_RETRY_S = 30.0
"""Seconds until the next try to remove an abandoned early upload from the store."""


@dataclass(slots=True)
class _Early:
    """One unfinished checkpoint."""

    name: str
    source: Unfinished
    journal: Journal
    transfer: FileTransfer | None = None
    added: dict[str, str] = field(default_factory=dict)
    """Stamp of each file that was queued, by path."""
    growing: dict[str, FoundFile] = field(default_factory=dict)
    """Files that were open at the latest poll, in their state then, by path."""
    grown: set[str] = field(default_factory=set)
    """Paths of the files that have grown between two polls."""
    begun: dict[str, FoundFile] = field(default_factory=dict)
    """Growing files, in the state up to which they were queued, by path."""
    allowed: bool | None = None
    """Whether files may be sent before the marker; ``None``: the store has not answered yet."""
    asked: bool = False
    """Whether ``allowed`` was requested from the store."""
    quiet_only: bool = False
    """Ignore close events: a file changed after it was closed. Only files that rest for a while are sent."""
    rest_until_s: float = 0.0
    """End of the backoff, in seconds of the event loop's clock."""
    is_abandoned: bool = False
    """Its directory was deleted, or is older than the newest durable step: its early upload is being removed."""
    began_s: float = field(default_factory=time.monotonic)
    """Time of its discovery, monotonic seconds."""
    wrote_at_s: float | None = None
    """Time of the last write to any of its files, epoch seconds; ``None``: not polled since the termination notice."""
    ending: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is handed over or abandoned."""

    def send_again(self) -> None:
        """Compare all files with the journal again, and send what is missing."""
        self.added.clear()
        self.begun.clear()

    def may_be_written(self, *, alive: bool) -> bool:
        """Whether a trainer process that is ``alive``, or just was, may finish it: it is no remnant of an earlier one."""
        quiet_s = time.time() - max(self.source.newest_mtime_s, self.wrote_at_s or 0.0)
        return quiet_s < ABANDONED_S or (alive and (self.wrote_at_s is None or quiet_s < FRESH_S))

    def is_rewritten(self, file: FoundFile) -> bool:
        """Whether a file is neither the version that was sent nor a continuation of it."""
        begun = self.begun.get(file.path)
        sent_as = self.added.get(file.path, file.stamp)
        return sent_as != file.stamp or (begun is not None and not _continues(begun, file))


class EarlyUploads:
    """Early uploads of all unfinished checkpoints. Used from the event loop only."""

    def __init__(self, context: UploadContext, volume: Volume, hints: Hints) -> None:
        self._context = context
        self._volume = volume
        self._hints = hints
        self._known: dict[str, _Early] = {}
        self._inherited = volume.early_uploads()
        """Names of early uploads of an earlier process that were neither taken over nor abandoned yet."""
        self._handed_over: dict[str, tuple[_Early, FileTransfer]] = {}
        """Early uploads of finished checkpoints with requests in flight: they keep their place in the queue."""
        self._woken = asyncio.Event()
        self._closed_only = False
        self._readable = True

    def send_closed_only(self) -> None:
        """Send only closed files from now on: the trainer changed a file after its beginning was sent."""
        if not self._closed_only:
            log.info("early_upload_waits_for_closing", reason="a file was changed after its beginning was sent")
        self._closed_only = True

    def poll_now(self) -> None:
        """Poll at once, after a termination notice."""
        self._woken.set()

    def writing(self, *, alive: bool) -> list[Writing]:
        """Return the checkpoints that the trainer is likely to finish.

        ``alive``: a training process holds its lease. Otherwise the writes have to be more recent.
        """
        now_s = time.monotonic()
        return [
            Writing(_waiting(early, terminating=True), early.transfer, early.source.size_bytes, now_s - early.began_s)
            for early in self._known.values()
            if not early.is_abandoned and early.may_be_written(alive=alive)
        ]

    def transfers(self) -> list[tuple[Waiting, FileTransfer]]:
        """Return the transfers with the input of their upload order: after a termination notice they precede periodic saves."""
        terminating = self._context.deadline.is_set()
        own = [(early, early.transfer) for early in self._known.values() if early.transfer is not None]
        transfers = [*own, *self._handed_over.values()]
        return [(_waiting(early, terminating=terminating), transfer) for early, transfer in transfers]

    async def run(self) -> None:
        """Send closed and growing files until cancelled."""
        for early in self._known.values():  # of a run that failed
            early.transfer, early.asked = None, early.allowed is not None
            early.send_again()
        async with task_group() as watchers:
            while True:
                began_s = time.monotonic()
                try:
                    await self._poll(watchers)
                    self._readable = True
                except OSError as error:
                    if self._readable:  # once, until it can be read again
                        log.warning(
                            "unfinished_checkpoints_not_readable", error=str(error), hint="is the volume still mounted?"
                        )
                    self._readable = False
                least_s = FLUSH_POLL_S if self._context.deadline.is_set() else POLL_S
                await within(max(least_s, PAUSE_FACTOR * (time.monotonic() - began_s)), self._woken.wait())
                self._woken.clear()

    def has(self, name: str) -> bool:
        """Whether a checkpoint has an early upload in progress."""
        early = self._known.get(name)
        return early is not None and early.transfer is not None

    async def hand_over(self, name: str) -> Handover:
        """Stop the early upload of a checkpoint, and return its journal and its parts in flight."""
        early = self._known.get(name)
        self._inherited.discard(name)
        self._hints.forget(name)
        if early is None:
            return Handover(await asyncio.to_thread(Journal, self._volume.early_journal(name)))
        async with early.ending:  # an abandonment in progress must not remove parts after the handover
            self._known.pop(name, None)
            transfer, early.transfer = early.transfer, None
            if transfer is None:
                return Handover(early.journal)
            self._handed_over[name] = early, transfer
            transfer.close()
            self._context.news.set()
            try:
                return Handover(early.journal, transfer, await transfer.wait_for_parts())
            finally:
                self._handed_over.pop(name, None)

    async def _poll(self, watchers: asyncio.TaskGroup) -> None:
        names = await asyncio.to_thread(self._volume.names)
        unfinished = [name for name in names if self._volume.marker_version(name) is None]
        finished, growing = set(names) - set(unfinished), set(filter(self._is_new, unfinished))
        self._hints.follow(*growing)
        self._hints.forget(*(set(names) - growing))
        unwanted = {name for name in self._inherited if not self._is_wanted(name, is_finished=name in finished)}
        self._inherited -= unwanted
        for name in (unwanted | growing) - self._known.keys():
            begun = await self._begin(name)
            if name in unwanted or self._volume.marker_version(name) is None:  # otherwise it was handed over meanwhile
                self._known[name] = begun
        for early in list(self._known.values()):
            if early.name in growing:
                await self._add_new(early, watchers)
            elif not self._is_wanted(early.name, is_finished=early.name in finished):
                await self._abandon(early)

    async def _begin(self, name: str) -> _Early:
        journal = await asyncio.to_thread(Journal, self._volume.early_journal(name))
        return _Early(name, Unfinished(self._volume / name), journal, grown=journal.growing())

    def _is_wanted(self, name: str, *, is_finished: bool) -> bool:
        """Whether the early upload will be taken over, by this process or the next one."""
        tracked = self._context.catalog.get(name)
        if tracked is not None and tracked.state in WANTED:  # also if only its pin exists
            return True
        return is_finished and (tracked is None or tracked.version != self._volume.marker_version(name))

    def _is_new(self, name: str) -> bool:
        """Whether no finished version depends on its objects in the store: no earlier save of the step, and no newer step."""
        earlier = self._context.catalog.get(name)
        if earlier is not None and earlier.state in PENDING:  # written again before it was durable
            return False
        newest = self._context.catalog.newest_durable_step
        step = step_of(name)
        return name == FINAL or newest is None or (step is not None and step > newest)

    async def _add_new(self, early: _Early, watchers: asyncio.TaskGroup) -> None:
        now_s = asyncio.get_running_loop().time()
        early.is_abandoned = False
        is_terminating = self._context.deadline.is_set()
        early.wrote_at_s = await asyncio.to_thread(newest_mtime, self._volume / early.name) if is_terminating else None
        if early.allowed is False or now_s < early.rest_until_s:
            return
        if is_terminating:  # in advance, because files may be closed at any moment
            self._request_permission(early, watchers)
        folder, closed = self._volume / early.name, self._hints.closed()
        seen = await asyncio.to_thread(list_files, folder, closed, growing=early.grown, quiet_only=early.quiet_only)
        early.grown |= {now.path for now in seen.open if now.path in early.growing and _is_longer(early.growing[now.path], now)}
        fresh = [file for file in seen.closed if early.added.get(file.path) != file.stamp]
        longer = [] if self._closed_only or early.quiet_only else _longer(early, seen)
        is_worth_it = bool(early.added or early.begun) or _is_worth_it([*fresh, *longer])
        if is_worth_it:
            self._request_permission(early, watchers)
            if early.allowed is None:  # ``growing`` is kept: after the answer, files are compared with the poll before this one
                return
        early.growing = {file.path: file for file in seen.open}
        if is_worth_it and self._is_impossible(early.name, [*seen.closed, *seen.open]):
            early.allowed = False
        if not is_worth_it or not (fresh or longer) or not early.allowed or self._known.get(early.name) is not early:
            return
        if any(map(early.is_rewritten, [*fresh, *seen.open])):  # the requests in flight are useless
            await self._stop(early)
            early.send_again()
            return
        self._send(early, fresh, longer, watchers)

    def _send(
        self, early: _Early, closed: Sequence[FoundFile], longer: Sequence[FoundFile], watchers: asyncio.TaskGroup
    ) -> None:
        for file in closed:
            early.source.see(file)
            early.added[file.path] = file.stamp
            early.begun.pop(file.path, None)
        for file in longer:
            early.source.see_growing(file)
            early.begun[file.path] = file
        if early.transfer is None:
            # The permission may be old by now, so the guard reads the commit at its first pass.
            guard = OverwriteGuard(self._context.committer, early.name, "", caller_reads=False, clock=self._context.clock)
            early.transfer = self._context.transfer(
                early.name, early.source, early.journal, guard=guard, on_wrong=self.send_closed_only
            )
            watchers.create_task(self._await_end(early, early.transfer))
            log.info("checkpoint_sent_early", checkpoint=early.name, closed_files=len(closed), growing_files=len(longer))
        early.transfer.add(closed)
        for file in longer:
            early.transfer.add_growing(file)
        self._context.news.set()

    async def _await_end(self, early: _Early, transfer: FileTransfer) -> None:
        try:
            while early.transfer is transfer and transfer.entries() is None:
                await transfer.finished()
        except (SidecarError, OSError) as error:
            log.info("early_upload_rests", checkpoint=early.name, reason=str(error))
            early.quiet_only = True
            early.rest_until_s = asyncio.get_running_loop().time() + BACKOFF_S
            early.send_again()
        if early.transfer is transfer:
            early.transfer = None

    def _request_permission(self, early: _Early, watchers: asyncio.TaskGroup) -> None:
        """Check once in the store whether files may be sent; polling continues meanwhile."""
        if not early.asked:
            early.asked = True
            watchers.create_task(self._check_permission(early))

    async def _check_permission(self, early: _Early) -> None:
        try:
            early.allowed = await self._reason_to_wait() is None and await self._is_untouched(early)
        except (StoreError, Fenced):
            early.allowed = False
        self._woken.set()

    async def _reason_to_wait(self) -> str | None:
        return await self._context.lease.reason_not_to_upload(None, self._context.pod.attempt())

    def _is_impossible(self, name: str, files: Sequence[FoundFile]) -> bool:
        """Whether the store never accepts the key of one of the files: its request would be repeated for ever."""
        return impossible_key(name, "", Node(), (file.path for file in files), self._context.store.key_limits) is not None

    async def _is_untouched(self, early: _Early) -> bool:
        return await self._context.committer.is_untouched(early.name, attempt=self._context.pod.attempt())

    async def _stop(self, early: _Early) -> None:
        if early.transfer is not None:
            transfer, early.transfer = early.transfer, None
            transfer.close()
            self._context.news.set()
            try:
                await transfer.finished()
            except (SidecarError, OSError):
                return

    async def _abandon(self, early: _Early) -> None:
        """Remove the early upload of a directory that was deleted, or is older than the newest durable step."""
        async with early.ending:
            now_s = asyncio.get_running_loop().time()
            if self._known.get(early.name) is not early or (early.is_abandoned and now_s < early.rest_until_s):
                return
            early.is_abandoned = True
            await self._stop(early)
            if not await self._is_removed(early):
                early.rest_until_s = now_s + CLEANUP_RETRY_S
                return
            early.journal.delete()
            early.journal = Journal(early.journal.place)
            self._hints.forget(early.name)
            self._known.pop(early.name, None)

    async def _is_removed(self, early: _Early) -> bool:
        """Remove an early upload from the store, except objects that others depend on; return False if that failed."""
        if not early.journal.stamps and not early.journal.void:
            return True
        try:
            if (reason := await self._reason_to_wait()) is None:
                is_free = await self._is_untouched(early)
                await self._context.committer.remove_early_upload(early.journal, whole_files=is_free)
        except (StoreError, Fenced) as error:
            reason = str(error)
        if reason is not None:
            log.warning("early_upload_not_removed", checkpoint=early.name, error=reason, hint="it is retried")
        return reason is None


def _waiting(early: _Early, *, terminating: bool) -> Waiting:
    return Waiting(early.name, step_of(early.name), urgent=terminating, written=False)


def _longer(early: _Early, seen: FilesSeen) -> list[FoundFile]:
    """Return the state of growing files at the poll before, up to which they can be sent.

    Almost all files are written from their beginning to their end. A preallocated file, which is filled later, never grows.
    """
    before = early.growing
    return [
        before[now.path]
        for now in seen.open
        if now.path in before
        and _is_longer(before[now.path], now)
        and before[now.path].size_bytes >= LEAST_BYTES
        and now.path not in early.added
    ]


def _continues(before: FoundFile, now: FoundFile) -> bool:
    return now.inode == before.inode and now.size_bytes >= before.size_bytes


def _is_longer(before: FoundFile, now: FoundFile) -> bool:
    return _continues(before, now) and now.size_bytes > before.size_bytes


def _is_worth_it(files: Sequence[FoundFile]) -> bool:
    newest_s = max((file.mtime_ns for file in files), default=0) / 1e9
    return sum(file.size_bytes for file in files) >= LEAST_BYTES and time.time() - newest_s < FRESH_S
