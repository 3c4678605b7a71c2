"""Sends files of checkpoints that the trainer still writes, so that the marker only has to confirm them.

Closed files go whole; of those that grow, the parts that lie before what was there at an earlier look. Nothing of it is
believed later without another look: each file is compared, byte for byte by its checksum, once the marker is
there. Where the step has anything in the store that another attempt may need, nothing is sent early.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from sidecar.core.format.found_checkpoint import FoundFile
from sidecar.core.lifecycle.states import WANTED
from sidecar.core.schedule.order import Waiting
from sidecar.errors import Fenced, SidecarError, StoreError
from sidecar.upload.commit.overwrite_guard import OverwriteGuard
from sidecar.upload.context import UploadContext
from sidecar.upload.schedule.flush_control import Writing
from sidecar.upload.send.file_transfer import FileTransfer
from sidecar.upload.send.journal import Journal
from sidecar.volume.unfinished import Look, Unfinished, look_at
from sidecar.volume.volume import Volume
from sidecar.volume.watch import Hints
from trainer_hook.contract import FINAL, step_of

log = structlog.get_logger()

LOOK_S = 0.5
"""How often the directories are looked at."""
LOOK_GOING_S = 0.05
"""The same, once the pod is going."""
LOOKING_SHARE = 10
"""Thousands of files take long to look at: so many times longer nobody looks again."""
LEAST_BYTES = 8 << 20
"""With less than this closed, the marker is likely to be quicker."""
REST_S = 5.0
"""How long a directory is left alone after a file changed under our eyes, or the store failed."""

ABANDONED_S = 2.0
"""Without a living trainer, a directory to which nothing was written for this long will not be finished."""
FRESH_S = 60.0
"""A directory in which nothing was written this lately is what an earlier life of the trainer left behind."""

ABANDON_AGAIN_S = 30.0
"""How long what could not be removed from the store is left alone."""


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
    """What the files that are being written were when they were looked at last, by path."""
    grown: set[str] = field(default_factory=set)
    """Paths of the files that became longer from one look to another."""
    begun: dict[str, FoundFile] = field(default_factory=dict)
    """Of these, those whose beginning was queued, and how much."""
    allowed: bool | None = None
    """Whether anything may be sent before the marker; ``None`` until the store has answered."""
    asked: bool = False
    """Whether the store was asked that."""
    quiet_only: bool = False
    rest_until_s: float = 0.0
    is_over: bool = False
    """It will not be finished."""
    began_s: float = field(default_factory=time.monotonic)
    """When it was first seen."""
    ending: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is handed over or abandoned."""

    def is_written_anew(self, file: FoundFile) -> bool:
        """Whether something else than what a file is now, or is the beginning of, was sent."""
        begun = self.begun.get(file.path)
        sent_as = self.added.get(file.path, file.stamp)
        return sent_as != file.stamp or (begun is not None and not _continues(begun, file))


@dataclass(frozen=True, slots=True)
class HandedOver:
    """What was sent of a checkpoint before it was finished."""

    journal: Journal
    """Of what is in the store; to be deleted when nothing is on its way any more."""
    transfer: FileTransfer | None = None
    """What carries the rest."""
    on_the_way: Mapping[str, set[int]] = field(default_factory=dict)
    """Numbers of the parts that have not arrived, by path."""

    async def settle(self, own: FileTransfer) -> None:
        """Let the checkpoint's own sending know what became of it, once nothing is on its way any more."""
        if self.transfer is None:
            return
        with contextlib.suppress(SidecarError, OSError):
            await self.transfer.finished()
        try:
            own.settle(self.journal)
        except Exception as error:  # otherwise what waits for these parts would wait for ever
            own.fail(error)


class EarlyUploads:
    """Used from the event loop only."""

    def __init__(self, context: UploadContext, volume: Volume, hints: Hints) -> None:
        self._context = context
        self._volume = volume
        self._hints = hints
        self._known: dict[str, _Early] = {}
        self._left = volume.left_early()
        """Names of what an earlier life of the sidecar was sending, until it is clear what becomes of each."""
        self._handed_over: dict[str, tuple[_Early, FileTransfer]] = {}
        """Finished ones, while what is under way of them ends: they keep their place."""
        self._woken = asyncio.Event()
        self._closed_only = False

    def wait_for_closing(self) -> None:
        """What was sent of a file is not what the trainer left: from now on only closed files are sent."""
        if not self._closed_only:
            log.info("early_upload_waits_for_closing", reason="a file was changed after its beginning was sent")
        self._closed_only = True

    def look_now(self) -> None:
        """Do not wait for the next look: the pod is going."""
        self._woken.set()

    def writing(self, *, alive: bool) -> list[Writing]:
        """Return what the trainer is likely to finish.

        Args:
            alive: A training process holds its lease. Without one, only what was written to just now counts.
        """
        now_s = time.monotonic()
        return [
            Writing(_place(early, going=True), early.transfer, early.source.size_bytes, now_s - early.began_s)
            for early in self._known.values()
            if not early.is_over and (alive or time.time() - early.source.newest_mtime_s < ABANDONED_S)
        ]

    def sendings(self) -> list[tuple[Waiting, FileTransfer]]:
        """Return what could be sent now, and its place in the queue: once the pod is going, before periodic ones."""
        going = self._context.is_going()
        transfer = [(early, early.transfer) for early in self._known.values() if early.transfer is not None]
        return [(_place(early, going=going), its) for early, its in [*transfer, *self._handed_over.values()]]

    async def run(self) -> None:
        """Look for closed files until cancelled."""
        async with asyncio.TaskGroup() as watchers:
            while True:
                began_s = time.monotonic()
                try:
                    await self._look(watchers)
                except OSError as error:
                    log.warning("unfinished_checkpoints_not_readable", error=str(error))
                least_s = LOOK_GOING_S if self._context.is_going() else LOOK_S
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(least_s, LOOKING_SHARE * (time.monotonic() - began_s))):
                        await self._woken.wait()
                self._woken.clear()

    def has(self, name: str) -> bool:
        """Whether something of a checkpoint is being sent early."""
        early = self._known.get(name)
        return early is not None and early.transfer is not None

    async def hand_over(self, name: str) -> HandedOver:
        """Stop sending early, and return what is in the store, and which parts are still on their way there."""
        early = self._known.get(name)
        self._left.discard(name)
        self._hints.forget(name)
        if early is None:
            return HandedOver(await asyncio.to_thread(Journal, self._volume.early_journal(name)))
        async with early.ending:  # if it is just being abandoned, nothing of it must be removed later
            self._known.pop(name, None)
            transfer, early.transfer = early.transfer, None
            if transfer is None:
                return HandedOver(early.journal)
            self._handed_over[name] = early, transfer
            transfer.close()
            self._context.news.set()
            try:
                return HandedOver(early.journal, transfer, await transfer.only_parts())
            finally:
                self._handed_over.pop(name, None)

    async def _look(self, watchers: asyncio.TaskGroup) -> None:
        names = await asyncio.to_thread(self._volume.names)
        unfinished = [name for name in names if self._volume.marker_signature(name) is None]
        finished, growing = set(names) - set(unfinished), set(filter(self._is_new, unfinished))
        self._hints.follow(*growing)
        self._hints.forget(*(set(names) - growing))
        left = {name for name in self._left if not self._is_wanted(name, is_finished=name in finished)}
        self._left -= left
        for name in (left | growing) - self._known.keys():
            begun = await self._begin(name)
            if name in left or self._volume.marker_signature(name) is None:  # else it was handed over meanwhile
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
        """Whether what was sent of a checkpoint will be taken over: by its upload, or by that of the sidecar's next life."""
        tracked = self._context.catalog.get(name)
        if tracked is not None and tracked.state in WANTED:  # perhaps only its pin is left
            return True
        return is_finished and (tracked is None or tracked.version != self._volume.marker_signature(name))

    def _is_new(self, name: str) -> bool:
        newest = self._context.catalog.newest_durable_step
        step = step_of(name)
        return name == FINAL or newest is None or (step is not None and step > newest)

    async def _add_new(self, early: _Early, watchers: asyncio.TaskGroup) -> None:
        now_s = asyncio.get_running_loop().time()
        early.is_over = False
        if early.allowed is False or now_s < early.rest_until_s:
            return
        if self._context.is_going():  # what there is to send will come at any moment
            self._ask(early, watchers)
        folder, closed = self._volume / early.name, self._hints.closed()
        look = await asyncio.to_thread(look_at, folder, closed, growing=early.grown, quiet_only=early.quiet_only)
        early.grown |= {now.path for now in look.open if now.path in early.growing and _is_longer(early.growing[now.path], now)}
        fresh = [file for file in look.closed if early.added.get(file.path) != file.stamp]
        longer = [] if self._closed_only or early.quiet_only else _longer(early, look)
        is_worth_it = bool(early.added or early.begun) or _is_worth_it([*fresh, *longer])
        if is_worth_it:
            self._ask(early, watchers)
            if early.allowed is None:  # when the answer is there, the next look is compared with the one before this one
                return
        early.growing = {file.path: file for file in look.open}
        if not is_worth_it or not (fresh or longer) or not early.allowed or self._known.get(early.name) is not early:
            return
        if any(map(early.is_written_anew, [*fresh, *look.open])):  # what is under way is of no use
            await self._stop(early)
            early.added.clear()
            early.begun.clear()
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
            guard = OverwriteGuard(self._context.committer, early.name, "", clock=self._context.clock.monotonic)
            early.transfer = self._context.transfer(early.name, early.source, early.journal, guard=guard, early=self)
            watchers.create_task(self._watch_over(early, early.transfer))
            log.info("checkpoint_sent_early", checkpoint=early.name, closed_files=len(closed), growing_files=len(longer))
        early.transfer.add(closed)
        for file in longer:
            early.transfer.add_growing(file)
        self._context.news.set()

    async def _watch_over(self, early: _Early, transfer: FileTransfer) -> None:
        try:
            while early.transfer is transfer and transfer.entries() is None:
                await transfer.finished()
        except (SidecarError, OSError) as error:
            log.info("early_upload_rests", checkpoint=early.name, reason=str(error))
            early.quiet_only = True
            early.rest_until_s = asyncio.get_running_loop().time() + REST_S
            early.added.clear()
            early.begun.clear()
        if early.transfer is transfer:
            early.transfer = None

    def _ask(self, early: _Early, watchers: asyncio.TaskGroup) -> None:
        """Ask the store once whether anything may be sent; looking goes on meanwhile."""
        if not early.asked:
            early.asked = True
            watchers.create_task(self._hear(early))

    async def _hear(self, early: _Early) -> None:
        try:
            objection = await self._objection()
            early.allowed = objection is None and await self._is_untouched(early)
        except (StoreError, Fenced):
            early.allowed = False
        self._woken.set()

    async def _objection(self) -> str | None:
        return await self._context.lease.objection(None, self._context.pod.attempt())

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
        """The directory is gone, older than what is durable, or of no use: remove what was sent of it."""
        async with early.ending:
            now_s = asyncio.get_running_loop().time()
            if self._known.get(early.name) is not early or (early.is_over and now_s < early.rest_until_s):
                return
            early.is_over = True
            await self._stop(early)
            if not await self._is_removed(early):
                early.rest_until_s = now_s + ABANDON_AGAIN_S
                return
            early.journal.delete()
            early.journal = Journal(early.journal.place)
            self._hints.forget(early.name)
            self._known.pop(early.name, None)

    async def _is_removed(self, early: _Early) -> bool:
        """Remove it from the store, but for objects that something there depends on; return whether that was possible now."""
        if not early.journal.stamps and not early.journal.void:
            return True
        try:
            if (objection := await self._objection()) is None:
                is_free = await self._is_untouched(early)
                await self._context.committer.discard(early.journal, whole_files=is_free)
        except (StoreError, Fenced) as error:
            objection = str(error)
        if objection is not None:
            log.warning("early_upload_not_removed", checkpoint=early.name, error=objection, hint="it is tried again")
        return objection is None


def _place(early: _Early, *, going: bool) -> Waiting:
    return Waiting(early.name, step_of(early.name), urgent=going, written=False)


def _longer(early: _Early, look: Look) -> list[FoundFile]:
    """Return what open files were at the look before, if they have become longer since: so much of them can be sent.

    Files are written from their beginning to their end, as good as always. One that has its size from the start, and is
    filled later, never becomes longer.
    """
    before = early.growing
    return [
        before[now.path]
        for now in look.open
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
