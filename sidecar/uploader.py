"""Takes finished checkpoints to the store, newest first, and tells the catalog what became of each."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from sidecar.catalog import Catalog, Tracked
from sidecar.committing import Committer, Standing, manifest_of
from sidecar.core import keys
from sidecar.core.commit import Mend, Ready, Wait, is_stale
from sidecar.core.local import Finished
from sidecar.core.order import overtakes, superseded, upload_order
from sidecar.core.states import State
from sidecar.errors import CheckpointChanged, CheckpointRejected, StoreError
from sidecar.journal import Journal
from sidecar.sending import Overtaken, Sender
from sidecar.store.protocol import Capabilities, Store
from sidecar.transfer import Transfers
from sidecar.volume import Volume, version_id
from trainer_hook.contract import ContractError, epoch_seconds, rfc3339

log = structlog.get_logger()

COMMIT_POLL_S = 1.0
"""How often a node that waits for others looks whether their manifests are there."""


class Uploader:
    """One upload at a time, over several connections; a newer checkpoint may pause it."""

    def __init__(
        self,
        *,
        store: Store,
        capabilities: Capabilities,
        volume: Volume,
        catalog: Catalog,
        transfers: Transfers,
        part_bytes: int,
        skip_superseded: bool,
        examine_again: Callable[[str], None],
    ) -> None:
        self._store = store
        self._can = capabilities
        self._volume = volume
        self._catalog = catalog
        self._transfers = transfers
        self._part_bytes = part_bytes
        self._skip_superseded = skip_superseded
        self._examine_again = examine_again
        self._committer = Committer(store, transfers)
        self._moved: dict[str, dict[str, str]] = {}
        """Paths whose key another node owns, by version of the checkpoint (I6)."""
        self._mended: dict[str, frozenset[str]] = {}
        """Paths whose object is not what our manifest says, by version: sent again, whatever the manifest says."""

    async def run(self) -> None:
        """Upload until cancelled."""
        while True:
            self._drop_superseded()
            tracked = self._next()
            if tracked is None:
                await self._catalog.changed()
            else:
                await self._upload_unless_overtaken(tracked)

    async def commit_when_all_are_there(self) -> None:
        """Watch over checkpoints that wait for other nodes, until cancelled."""
        while True:
            for tracked in self._catalog.pending():
                if tracked.state is State.UPLOADED and tracked.checkpoint is not None:
                    try:
                        await self._try_commit(tracked, tracked.checkpoint)
                    except StoreError as error:
                        log.warning("commit_tried_again", checkpoint=tracked.name, error=str(error))
            await asyncio.sleep(COMMIT_POLL_S)

    def _queue(self) -> list[Tracked]:
        waiting = {t.name: t for t in self._catalog.pending() if t.state is not State.UPLOADED}
        return [waiting[w.name] for w in upload_order(t.waiting for t in waiting.values())]

    def _next(self) -> Tracked | None:
        return next(iter(self._queue()), None)

    def _drop_superseded(self) -> None:
        if not self._skip_superseded:
            return
        queue = {t.name: t for t in self._queue()}
        for old in superseded((t.waiting for t in queue.values()), newest_committed_step=self._catalog.newest_durable_step):
            newest = self._catalog.newest_durable_step
            self._catalog.move(queue[old.name], State.SUPERSEDED, reason=f"step {newest} is durable and CKPT_SUPERSEDED=skip")
            self._let_go(queue[old.name])

    async def _upload_unless_overtaken(self, tracked: Tracked) -> None:
        pause = asyncio.Event()
        task = asyncio.create_task(self._upload(tracked, pause))
        try:
            while not task.done():
                change = asyncio.create_task(self._catalog.changed())
                await asyncio.wait({task, change}, return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
                first = self._next()
                if (
                    first is not None
                    and first is not tracked
                    and overtakes(first.waiting, tracked.waiting)
                    and not pause.is_set()
                ):
                    first.overtook = True
                    pause.set()
            await task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _upload(self, tracked: Tracked, pause: asyncio.Event) -> None:
        assert tracked.checkpoint is not None
        try:
            await self._take_to_store(tracked, tracked.checkpoint, pause)
        except* Overtaken:
            tracked.overtook = False
            self._catalog.move(tracked, State.PAUSED, reason="a newer checkpoint goes first")
        except* CheckpointChanged as group:
            self._start_over(tracked, str(_leaf(group)))
        except* CheckpointRejected as group:
            self._catalog.move(tracked, State.LOST, reason=str(_leaf(group)))
        except* (StoreError, OSError) as group:
            # An unfinished upload vanished, the wire corrupts, the disk fails: what was verified is kept.
            log.warning("upload_starts_again", checkpoint=tracked.name, error=str(_leaf(group)))
            await asyncio.sleep(COMMIT_POLL_S)

    async def _take_to_store(self, tracked: Tracked, checkpoint: Finished, pause: asyncio.Event) -> None:
        there = await self._committer.standing(checkpoint.name)
        if checkpoint.restored_from is not None:
            self._recognise(tracked, checkpoint.restored_from, there)
            return
        if there is not None and await self._belongs_to_later_attempt(tracked, checkpoint, there):
            return
        journal = self._journal(checkpoint)
        sender = Sender(
            store=self._store,
            capabilities=self._can,
            transfers=self._transfers,
            pin=await asyncio.to_thread(self._volume.pin, checkpoint),
            journal=journal,
            part_bytes=self._part_bytes,
            pause=pause,
            on_progress=lambda sent_bytes: self._progressed(tracked, sent_bytes),
        )
        before = await self._committer.own_manifest(checkpoint)
        if before is not None:
            mended = self._mended.pop(checkpoint.version, frozenset())
            await sender.adopt({entry.path: entry for entry in before.files if entry.path not in mended})
        if there is not None:
            if before is not None and sender.entries() == list(before.files) and there.names(before):
                self._durable(tracked, checkpoint, at=_committed_at(there), began_s=None)
                return
            # Its content changes: first it becomes invisible to resume (I4).
            await self._committer.take_back_commit(checkpoint.name)
        await self._send(tracked, checkpoint, sender)

    async def _send(self, tracked: Tracked, checkpoint: Finished, sender: Sender) -> None:
        began_s = time.monotonic()
        self._catalog.move(tracked, State.UPLOADING, size_bytes=checkpoint.size_bytes, already_sent_bytes=sender.sent_bytes())
        entries = await sender.send(self._moved.get(checkpoint.version, {}))
        await self._committer.publish_manifest(manifest_of(checkpoint, entries))
        self._catalog.move(tracked, State.UPLOADED, upload_s=round(time.monotonic() - began_s, 3))
        await self._try_commit(tracked, checkpoint, began_s=began_s)

    async def _try_commit(self, tracked: Tracked, checkpoint: Finished, *, began_s: float | None = None) -> None:
        decision = await self._committer.try_commit(checkpoint)
        if tracked.state is not State.UPLOADED:  # meanwhile given up, or written anew
            return
        match decision:
            case Ready():
                self._durable(tracked, checkpoint, at=time.time(), began_s=began_s)
            case Wait(reason):
                self._catalog.move(tracked, State.UPLOADED, reason=reason)
            case Mend(files, reason):
                journal = self._journal(checkpoint)
                for path in files:
                    journal.dropped(path)
                moved = {path: key for path, key in files.items() if key != keys.shared_file(checkpoint.name, path)}
                self._moved.setdefault(checkpoint.version, {}).update(moved)
                self._mended[checkpoint.version] = frozenset(files)
                self._catalog.move(tracked, State.FINISHED, reason=reason)

    def _durable(self, tracked: Tracked, checkpoint: Finished, *, at: float, began_s: float | None) -> None:
        took = {} if began_s is None else {"upload_s": round(time.monotonic() - began_s, 3)}
        age_s = round(max(0.0, at - checkpoint.created_at_s), 3)
        self._catalog.durable(
            tracked,
            at_s=at,
            attempt=checkpoint.attempt,
            files=len(checkpoint.files),
            size_bytes=checkpoint.size_bytes,
            saved_to_durable_s=age_s,
            retries=self._transfers.retries,
            **took,
        )
        self._let_go(tracked)

    def _recognise(self, tracked: Tracked, restored_from: str, there: Standing | None) -> None:
        if there is not None and there.crc64nvme == restored_from:
            self._catalog.durable(tracked, at_s=_committed_at(there), downloaded=True)
        else:
            reason = "it was downloaded, and its commit is no longer in the store"
            self._catalog.move(tracked, State.SUPERSEDED, reason=reason)

    async def _belongs_to_later_attempt(self, tracked: Tracked, checkpoint: Finished, there: Standing) -> bool:
        if _is_of(there, checkpoint):
            return False
        theirs = there.commit
        if theirs is not None and is_stale(
            ours=checkpoint.attempt,
            our_created_at=rfc3339(checkpoint.created_at_s),
            theirs=theirs.attempt,
            their_created_at=theirs.created_at,
        ):
            self._catalog.move(tracked, State.SUPERSEDED, reason=f"attempt {theirs.attempt} wrote this step later")
            self._let_go(tracked)
            return True
        await self._committer.make_way(checkpoint.name)
        return False

    def _start_over(self, tracked: Tracked, reason: str) -> None:
        assert tracked.checkpoint is not None
        self._catalog.move(tracked, State.FINISHED, reason=reason)
        self._let_go(tracked)
        self._catalog.forget(tracked.name)
        self._examine_again(tracked.name)

    def _let_go(self, tracked: Tracked) -> None:
        if tracked.checkpoint is not None:
            self._volume.unpin(tracked.checkpoint)
            self._journal_path(tracked.checkpoint).unlink(missing_ok=True)
            self._moved.pop(tracked.checkpoint.version, None)
            self._mended.pop(tracked.checkpoint.version, None)

    def _journal(self, checkpoint: Finished) -> Journal:
        return Journal(self._journal_path(checkpoint))

    def _journal_path(self, checkpoint: Finished) -> Path:
        return self._volume.journal / f"{checkpoint.name}@{version_id(checkpoint.version)}.jsonl"

    def _progressed(self, tracked: Tracked, sent_bytes: int) -> None:
        tracked.sent_bytes = sent_bytes


def _is_of(there: Standing, checkpoint: Finished) -> bool:
    return there.commit is not None and there.commit.attempt == checkpoint.attempt


def _committed_at(there: Standing) -> float:
    stamp = there.commit.committed_at if there.commit else None
    try:
        return epoch_seconds(stamp) if stamp else time.time()
    except ContractError:
        return time.time()


def _leaf(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group
