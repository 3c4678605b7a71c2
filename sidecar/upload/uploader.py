"""Takes finished checkpoints to the store, newest first, and tells the catalog what became of each.

Each pending checkpoint is a task of its own that asks, sends, publishes and commits. What they have to send goes through one
stream, in the order of the queue, so that a newer checkpoint goes first at once and nothing waits for a link that is idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import structlog

from sidecar.catalog import Catalog, Tracked
from sidecar.core import keys
from sidecar.core.commit import Mend, Ready, Wait, Yield
from sidecar.core.flush import Plan
from sidecar.core.local import Finished
from sidecar.core.manifest import FileEntry
from sidecar.core.order import superseded
from sidecar.core.rewrite import Keep, Same
from sidecar.core.states import LET_GO, PENDING, State
from sidecar.errors import CheckpointChanged, CheckpointRejected, StoreError, UnreadableFile
from sidecar.store.protocol import Capabilities, Store
from sidecar.transfer import Transfers
from sidecar.upload.already_there import AlreadyThere
from sidecar.upload.committing import Committer, Standing, manifest_of
from sidecar.upload.early import EarlyUploads, HandedOver
from sidecar.upload.fence import Fence, Outdated
from sidecar.upload.flushing import PLAN_S, Flush
from sidecar.upload.journal import Journal
from sidecar.upload.leftovers import abort_leftovers
from sidecar.upload.queue import Active, Queue, say_uploading
from sidecar.upload.second_looks import SecondLooks
from sidecar.upload.senders import Senders
from sidecar.upload.stream import Stream
from sidecar.upload.unchanged import Unchanged
from sidecar.volume.pins import Pin, version_id
from sidecar.volume.volume import Volume
from sidecar.volume.watch import Hints
from trainer_hook.contract import ContractError, Node, epoch_seconds

log = structlog.get_logger()

COMMIT_POLL_S = 1.0
"""How often a node that waits for others looks whether their manifests are there."""


class Uploader:
    """Decides what is sent and when it is committed."""

    def __init__(
        self,
        *,
        store: Store,
        capabilities: Capabilities,
        volume: Volume,
        catalog: Catalog,
        transfers: Transfers,
        hints: Hints,
        skip_superseded: bool,
        examine_again: Callable[[str], None],
        attempt: Callable[[], str],
        left_s: Callable[[], float | None],
        trainer_alive: Callable[[], bool],
        on_plan: Callable[[Plan | None], None],
        is_quarantined: Callable[[str], bool],
        objection: Callable[[Node | None, str], Awaitable[str | None]],
        alone: bool,
    ) -> None:
        self._alone = alone
        self._objection = objection
        self._store = store
        self._volume = volume
        self._catalog = catalog
        self._transfers = transfers
        self._skip_superseded = skip_superseded
        self._examine_again = examine_again
        self._left_s = left_s
        self._trainer_alive = trainer_alive
        self._flush = Flush(transfers, on_plan=on_plan)
        self._committer = Committer(store, transfers)
        self._news = asyncio.Event()
        self._ended = asyncio.Event()
        self._unchanged = Unchanged()
        self._senders = Senders(
            store=store,
            capabilities=capabilities,
            transfers=transfers,
            committer=self._committer,
            flush=self._flush,
            unchanged=self._unchanged,
            on_change=self._news.set,
            on_sent_in_vain=lambda: self._early.wait_for_closing(),
        )
        self._already_there = AlreadyThere(self._committer, transfers, self._senders.bodies, is_quarantined=is_quarantined)
        self._second_looks = SecondLooks(catalog, self._committer, is_going=self._is_going)
        self._stream = Stream(transfers)
        self._moved: dict[str, dict[str, str]] = {}
        """Paths whose key another node owns, by version of the checkpoint (I6)."""
        self._mended: dict[str, frozenset[str]] = {}
        """Paths whose object is not what our manifest says, by version: sent again, whatever the manifest says."""
        self._early = EarlyUploads(
            volume=volume,
            catalog=catalog,
            hints=hints,
            committer=self._committer,
            make_sending=self._senders.early,
            attempt=attempt,
            objection=lambda: objection(None, attempt()),
            going=lambda: left_s() is not None,
            on_change=self._news.set,
        )
        self._queue = Queue(catalog, self._early, self._flush)

    def _is_going(self) -> bool:
        return self._left_s() is not None

    async def run(self) -> None:
        """Upload until cancelled. Run again after a mistake, it begins with what the journals say."""
        self._queue.active.clear()
        self._stream = Stream(self._transfers)
        await abort_leftovers(
            self._store,
            self._transfers,
            self._volume.journal,
            alone=self._alone,
            newest_committed_step=self._catalog.newest_durable_step,
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            tasks.create_task(self._early.run())
            tasks.create_task(self._commit_when_all_are_there())
            tasks.create_task(self._keep_pace())
            tasks.create_task(self._second_looks.run())
            while True:
                self._queue.plan(self._left_s(), trainer_alive=self._trainer_alive)
                self._drop_superseded(tasks)
                self._begin_and_end(tasks)
                ordered = self._queue.in_order()
                self._stream.reorder(ordered, strictly=self._is_going())
                self._flush.hold(ordered, next_up=self._queue.handed_over())
                await self._news.wait()
                self._news.clear()

    async def _listen(self) -> None:
        while True:
            self._news.set()  # first: what changed while nobody was listening is news, too
            await self._catalog.changed()

    async def _keep_pace(self) -> None:
        """Measure what leaves, and while the pod is going decide again as it changes."""
        was_going = False
        while True:
            is_going = self._is_going()
            busy = any(sending.in_flight for sending in self._queue.all().values())
            self._transfers.pace.look(self._transfers.gate.passed_bytes, now_s=time.monotonic(), busy=busy)
            if is_going or was_going:
                self._news.set()
            if is_going is not was_going:
                was_going = is_going
                self._wake_those_that_wait()
                self._early.look_now()
            await self._transfers.pause(PLAN_S)

    # What goes first.

    def _begin_and_end(self, tasks: asyncio.TaskGroup) -> None:
        """Begin what has its turn; end what was written anew, deleted or superseded meanwhile."""
        for active in self._queue.active.values():
            if active.sending is not None and not self._is_current(active.tracked):
                active.sending.close()
        for active in self._queue.begin():
            tasks.create_task(self._upload(active))

    def _is_replaced(self, tracked: Tracked) -> bool:
        return self._catalog.get(tracked.name) is not tracked

    def _is_current(self, tracked: Tracked) -> bool:
        return not self._is_replaced(tracked) and tracked.state in PENDING

    def _drop_superseded(self, tasks: asyncio.TaskGroup) -> None:
        queue = {t.name: t for t in self._catalog.pending() if self._skip_superseded or self._queue.waits_for_others(t)}
        newest = self._catalog.newest_durable_step
        for old in superseded((t.waiting for t in queue.values()), newest_committed_step=newest):
            tracked = queue[old.name]
            waited = self._queue.waits_for_others(tracked)
            why = "other nodes did not finish it" if waited else "CKPT_SUPERSEDED=skip"
            self._catalog.move(tracked, State.SUPERSEDED, reason=f"step {newest} is durable and {why}")
            if tracked.name not in self._queue.active:
                tasks.create_task(self._discard(tracked))

    # One upload.

    async def _upload(self, active: Active) -> None:
        tracked = active.tracked
        assert tracked.checkpoint is not None
        try:
            await self._take_to_store(active, tracked.checkpoint)
        except CheckpointChanged as error:
            self._start_over(tracked, str(error))
        except CheckpointRejected as error:
            self._catalog.move(tracked, State.LOST, reason=str(error))
        except Outdated as error:
            log.warning("upload_starts_again", checkpoint=tracked.name, error=str(error))
            self._restart(tracked, str(error))
        except (StoreError, UnreadableFile, OSError) as error:
            # An unfinished upload vanished, the wire corrupts, the disk fails: what was verified is kept.
            log.warning("upload_starts_again", checkpoint=tracked.name, error=str(error))
            await asyncio.sleep(COMMIT_POLL_S)
            self._restart(tracked, str(error))
        if self._is_replaced(tracked) or tracked.state in LET_GO:
            await self._discard(tracked)
        del self._queue.active[tracked.name]
        self._news.set()
        self._wake_those_that_wait()

    def _wake_those_that_wait(self) -> None:
        self._ended.set()
        self._ended = asyncio.Event()

    async def _take_to_store(self, active: Active, checkpoint: Finished) -> None:
        tracked = active.tracked
        if not await self._nobody_objects(active, checkpoint):
            return
        fence = Fence(self._committer, checkpoint.name, checkpoint.attempt, checkpoint.save_id)
        there, before = await asyncio.gather(
            self._committer.standing(checkpoint.name), self._committer.own_manifest(checkpoint)
        )
        if checkpoint.restored_from is not None:
            self._recognise(tracked, checkpoint.restored_from, there)
            return
        if there is None and await self._committer.withdraw_earlier(checkpoint, before):
            there = await self._committer.standing(checkpoint.name)
        pin = await asyncio.to_thread(self._volume.pins.hold, checkpoint)
        async with self._taken_over(active, checkpoint) as (journal, before_marker):
            if there is not None and not await self._may_be_written(tracked, checkpoint, pin, there):
                return
            mended = self._mended.pop(checkpoint.version, frozenset())
            await self._already_there.adopt(checkpoint, pin, journal, before, but=mended)
            began_s = time.monotonic()
            entries = await self._send(active, checkpoint, pin, journal, fence, before_marker)
        await self._those_ahead_are_through(tracked)
        if self._is_current(tracked):
            await self._publish(tracked, checkpoint, entries, began_s=began_s)

    async def _nobody_objects(self, active: Active, checkpoint: Finished) -> bool:
        """Wait until it is known that this run may write the checkpoint, and let whatever else there is go first meanwhile.

        Returns:
            Whether it may: otherwise the checkpoint was given up, or written anew.
        """
        while self._is_current(active.tracked):
            reason = await self._objection(checkpoint.node, checkpoint.attempt)
            if reason is None:
                active.is_held = False
                return True
            if not active.is_held:
                log.warning("upload_waits", checkpoint=checkpoint.name, reason=reason)
                self._catalog.move(active.tracked, active.tracked.state, reason=reason)
            active.is_held = True
            self._news.set()
            await asyncio.sleep(COMMIT_POLL_S * max(1.0, checkpoint.node.count / 1000))
        return False

    async def _send(
        self, active: Active, checkpoint: Finished, pin: Pin, journal: Journal, fence: Fence, before_marker: HandedOver
    ) -> list[FileEntry]:
        """Let the stream send what is missing; what comes back counts only if the checkpoint is still wanted."""
        if not self._is_current(active.tracked):
            return []
        sending = self._senders.sending(checkpoint.name, pin, journal, fence=fence, tracked=active.tracked)
        say_uploading(self._catalog, active.tracked, sending)
        sending.add(checkpoint.files, moved=self._moved.get(checkpoint.version), awaited=before_marker.on_the_way)
        late = asyncio.create_task(before_marker.settle(sending))
        active.sending, active.hands_over = sending, False
        self._news.set()
        try:
            return await sending.finished()
        finally:
            late.cancel()
            active.sending, active.is_sent = None, True
            self._news.set()

    async def _publish(self, tracked: Tracked, checkpoint: Finished, entries: list[FileEntry], *, began_s: float) -> None:
        if tracked.state is State.PAUSED:
            self._catalog.move(tracked, State.UPLOADING)
        await self._committer.publish_manifest(manifest_of(checkpoint, entries))
        self._catalog.move(tracked, State.UPLOADED, upload_s=round(time.monotonic() - began_s, 3))
        await self._try_commit(tracked, checkpoint, began_s=began_s)

    async def _those_ahead_are_through(self, tracked: Tracked) -> None:
        """Let what goes first, and has nothing left to send but what is under way, be committed first: if there is time."""
        while not self._is_going() and any(
            other.is_ending and self._queue.goes_first(other.tracked, tracked) for other in self._queue.active.values()
        ):
            await self._ended.wait()

    async def _may_be_written(self, tracked: Tracked, checkpoint: Finished, pin: Pin, there: Standing) -> bool:
        match await self._already_there.decide(checkpoint, pin, there):
            case Same():
                self._committer.found_equal(checkpoint, there)
                self._durable(tracked, checkpoint, at=_committed_at(there), began_s=None)
                self._second_looks.became_durable(tracked)
                return False
            case Keep(reason, torn):
                self._catalog.move(tracked, State.REJECTED if torn else State.SUPERSEDED, reason=reason)
                return False
        return True

    # What came of it.

    async def _commit_when_all_are_there(self) -> None:
        while True:
            for tracked in self._catalog.pending():
                if self._queue.waits_for_others(tracked) and tracked.checkpoint is not None:
                    try:
                        await self._try_commit(tracked, tracked.checkpoint)
                    except StoreError as error:
                        log.warning("commit_tried_again", checkpoint=tracked.name, error=str(error))
            await asyncio.sleep(COMMIT_POLL_S)

    async def _try_commit(self, tracked: Tracked, checkpoint: Finished, *, began_s: float | None = None) -> None:
        decision, at_s = await self._committer.try_commit(checkpoint, hurried=self._is_going()), time.time()
        if isinstance(decision, Ready) and not self._is_going():  # else somebody waits for it
            await self._sweep(tracked, checkpoint)
        if tracked.state is not State.UPLOADED:  # given up meanwhile
            return
        match decision:
            case Ready():
                self._durable(tracked, checkpoint, at=at_s, began_s=began_s)
                self._second_looks.became_durable(tracked)
                await self._sweep(tracked, checkpoint)
            case Yield(reason):
                self._catalog.move(tracked, State.SUPERSEDED, reason=reason)
                await self._discard(tracked)
            case Wait(reason):
                self._catalog.move(tracked, State.UPLOADED, reason=reason)
            case Mend(files, reason):
                journal = Journal(self._journal_path(checkpoint))
                for path in files:
                    journal.dropped(path)
                journal.close()
                moved = {path: key for path, key in files.items() if key != keys.shared_file(checkpoint.name, path)}
                self._moved.setdefault(checkpoint.version, {}).update(moved)
                self._mended[checkpoint.version] = frozenset(files)
                self._catalog.move(tracked, State.FINISHED, reason=reason)

    async def _sweep(self, tracked: Tracked, checkpoint: Finished) -> None:
        if not self._is_replaced(tracked):  # else what is being sent now would look like what is left
            await self._committer.sweep(checkpoint)

    def _durable(self, tracked: Tracked, checkpoint: Finished, *, at: float, began_s: float | None) -> None:
        took = {} if began_s is None else {"upload_s": round(time.monotonic() - began_s, 3)}
        self._catalog.durable(
            tracked,
            at_s=at,
            attempt=checkpoint.attempt,
            files=len(checkpoint.files),
            size_bytes=checkpoint.size_bytes,
            saved_to_durable_s=round(max(0.0, at - checkpoint.created_at_s), 3),
            retries=self._transfers.retries,
            **took,
        )
        journal = Journal(self._journal_path(checkpoint))
        self._unchanged.committed(journal.entries.values(), journal.first_crcs)
        self._let_go(tracked)

    def _recognise(self, tracked: Tracked, restored_from: str, there: Standing | None) -> None:
        if there is not None and there.crc64nvme == restored_from:
            self._catalog.durable(tracked, at_s=_committed_at(there), downloaded=True)
        else:
            reason = "it was downloaded, and its commit is no longer in the store"
            self._catalog.move(tracked, State.SUPERSEDED, reason=reason)

    def _restart(self, tracked: Tracked, reason: str) -> None:
        if self._is_current(tracked):
            self._catalog.move(tracked, State.FINISHED, reason=reason)

    def _start_over(self, tracked: Tracked, reason: str) -> None:
        if self._is_current(tracked):
            self._catalog.move(tracked, State.FINISHED, reason=reason)
            self._let_go(tracked)
            self._catalog.forget(tracked.name)
            self._examine_again(tracked.name)

    async def _discard(self, tracked: Tracked) -> None:
        """Let go of a checkpoint that will not be sent, and of its unfinished uploads."""
        if tracked.checkpoint is not None:
            for progress in Journal(self._journal_path(tracked.checkpoint)).uploads.values():
                try:
                    await self._transfers.once(self._store.abort_upload, progress.key, progress.upload_id)
                except StoreError as error:  # a later start, or the bucket's lifecycle rule, removes it
                    log.warning("unfinished_upload_not_aborted", key=progress.key, error=str(error))
        self._let_go(tracked)

    def _let_go(self, tracked: Tracked) -> None:
        if tracked.checkpoint is not None:
            self._volume.pins.release(tracked.checkpoint)
            self._journal_path(tracked.checkpoint).unlink(missing_ok=True)
            self._moved.pop(tracked.checkpoint.version, None)
            self._mended.pop(tracked.checkpoint.version, None)

    # What a journal knows.

    @contextlib.asynccontextmanager
    async def _taken_over(self, active: Active, checkpoint: Finished) -> AsyncIterator[tuple[Journal, HandedOver]]:
        """Yield the checkpoint's journal, which knows what was sent of it early, and what of that is still on its way."""
        active.hands_over = self._early.has(checkpoint.name)
        early = await self._early.hand_over(checkpoint.name)
        try:
            with contextlib.closing(Journal(self._journal_path(checkpoint))) as journal:
                for stale in journal.take_over(early.journal, checkpoint.files):
                    await self._transfers.persistently(self._store.abort_upload, stale.key, stale.upload_id)
                if early.sending is None:  # else it is told yet what arrives
                    early.journal.delete()
                yield journal, early
        finally:
            active.hands_over = False
            early.journal.delete()

    def _journal_path(self, checkpoint: Finished) -> Path:
        return self._volume.journal / f"{checkpoint.name}@{version_id(checkpoint.version)}.jsonl"


def _committed_at(there: Standing) -> float:
    stamp = there.commit.committed_at if there.commit else None
    try:
        return epoch_seconds(stamp) if stamp else time.time()
    except ContractError:
        return time.time()
