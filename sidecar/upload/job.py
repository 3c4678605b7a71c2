"""One checkpoint from finished to durable, top to bottom, and what becomes of each error."""

from __future__ import annotations

from typing import Any

import structlog

from sidecar.core.commit.commit import GiveWay, Ready, Reupload, Wait
from sidecar.core.commit.rewrite import AlreadyCommitted, KeepExisting
from sidecar.core.format import keys
from sidecar.core.lifecycle.states import LET_GO, State
from sidecar.core.schedule.parts import largest_file_bytes
from sidecar.errors import CheckpointChanged, CheckpointRejected, Fenced, SidecarError, StoreError, TooLarge, UnreadableFile
from sidecar.repository.documents import StoredCommit
from sidecar.upload.commit.committer import manifest_of
from sidecar.upload.commit.existing_commit import ExistingCommit
from sidecar.upload.commit.overwrite_guard import Outdated, OverwriteGuard
from sidecar.upload.commit.post_commit_check import PostCommitCheck
from sidecar.upload.context import UploadContext
from sidecar.upload.schedule.queue import Active, Queue
from sidecar.upload.send.journal import Journal
from sidecar.upload.versions import Held, Versions
from trainer_hook.contract import ContractError, epoch_seconds

log = structlog.get_logger()

COMMIT_POLL_S = 1.0
"""Seconds between two looks at what an upload waits for: the manifests of other nodes, the lease of the prefix."""


class UploadJob:
    """One upload of one version of a checkpoint. What it needs of time, store and files it is given."""

    def __init__(
        self, context: UploadContext, versions: Versions, queue: Queue, post_commit_check: PostCommitCheck, active: Active
    ) -> None:
        assert active.tracked.checkpoint is not None
        self._context = context
        self._versions = versions
        self._queue = queue
        self._post_commit_check = post_commit_check
        self._active = active
        self._tracked = active.tracked
        self._checkpoint = active.tracked.checkpoint
        self._began_s: float | None = None
        """When sending began, by the monotonic clock."""

    async def run(self) -> None:
        """Do it. Afterwards the checkpoint is durable, waits for other nodes, is given up, or is to be taken again."""
        tracked, catalog = self._tracked, self._context.catalog
        try:
            await self._take_to_store()
        except CheckpointChanged as error:
            self._examine_again(str(error))
        except CheckpointRejected as error:
            if catalog.is_current(tracked):
                catalog.move(tracked, State.LOST, reason=str(error))
        except Fenced as error:
            self.give_up(str(error))
        except Outdated as error:
            log.warning("upload_starts_again", checkpoint=tracked.name, error=str(error))
            self._restart(str(error))
        except TooLarge as error:
            self._reject(str(error))
        except (StoreError, UnreadableFile, OSError) as error:
            # An unfinished upload vanished, the wire corrupts, the disk fails: what was verified is kept.
            await self._rest(error)
        if catalog.is_replaced(tracked) or tracked.state in LET_GO:
            await self.discard()
        self._queue.end(self._active)
        self._context.news.set()

    async def _take_to_store(self) -> None:
        context, checkpoint, committer = self._context, self._checkpoint, self._context.committer
        # May we write it?
        self._require_possible_sizes()
        # A downloaded one is written by nobody: its attempt is an earlier one, which must not be declared this pod's own.
        if checkpoint.restored_from is None and not await self._nobody_objects():
            return
        guard = OverwriteGuard(
            committer,
            checkpoint.name,
            checkpoint.attempt,
            checkpoint.save_id,
            node=checkpoint.node,
            clock=context.clock.monotonic,
        )
        there, before = await committer.already_there(checkpoint)
        if checkpoint.restored_from is not None:
            self._recognise(checkpoint.restored_from, there)
            return
        if there is None and await committer.withdraw_earlier(checkpoint, before):
            there = await committer.stored_commit(checkpoint.name)
        # Hold its files, and take over what was sent early.
        held = await self._versions.hold(checkpoint)
        async with self._versions.taken_over(self._active, checkpoint) as sent:
            # Adopt objects of an earlier life of this sidecar.
            existing = ExistingCommit(committer, context.executor, context.quarantine)
            if there is not None and not await self._may_replace(existing, held, there):
                return
            damaged = context.reuploads.take_damaged(checkpoint.version)
            await existing.adopt(checkpoint, held.contents, sent.journal, before, but=damaged)
            # Send the rest.
            self._began_s = context.clock.monotonic()
            if not context.catalog.is_current(self._tracked):
                return
            entries = await self._versions.send(self._active, checkpoint, held, sent, guard)
        # Wait for those ahead, publish the manifest, commit.
        await self._those_ahead_are_through()
        if context.catalog.is_current(self._tracked):
            if self._tracked.state is State.PAUSED:
                context.catalog.move(self._tracked, State.UPLOADING)
            await committer.publish_manifest(manifest_of(checkpoint, entries))
            if context.catalog.is_current(self._tracked):  # else superseded or given up meanwhile
                context.catalog.move(self._tracked, State.UPLOADED, **self._took())
                await self.commit()

    async def commit(self) -> None:
        """Commit, where this node's manifest is published: if nothing is missing, and it is this node's turn.

        Called again while the checkpoint is ``UPLOADED``: it waits for other nodes.

        Raises:
            StoreError: It cannot be known now.
        """
        context, tracked, checkpoint = self._context, self._tracked, self._checkpoint
        decision = await context.committer.try_commit(checkpoint, hurried=context.is_going())
        at_s = context.clock.epoch()
        if isinstance(decision, Ready) and not context.is_going():  # else somebody waits for it
            await self._sweep()
        if tracked.state is not State.UPLOADED:  # given up meanwhile
            return
        match decision:
            case Ready():
                await self._durable(at_s)
                self._post_commit_check.became_durable(tracked)
                await self._sweep()
            case GiveWay(reason):
                context.catalog.move(tracked, State.SUPERSEDED, reason=reason)
                await self.discard()
            case Wait(reason):
                context.catalog.move(tracked, State.UPLOADED, reason=reason)
            case Reupload(files, reason):
                journal = await self._versions.journal(checkpoint)
                for path in files:
                    journal.dropped(path)
                journal.close()
                context.reuploads.ask(checkpoint, files)
                context.catalog.move(tracked, State.FINISHED, reason=reason)

    async def discard(self) -> None:
        """Let go of a checkpoint that will not be sent, and of its unfinished uploads."""
        await self._abort_uploads(await self._versions.journal(self._checkpoint))
        self._let_go()

    def give_up(self, reason: str) -> None:
        """Do not send or commit it any more; what was sent stays, for a later life."""
        catalog, tracked = self._context.catalog, self._tracked
        if catalog.is_current(tracked):
            catalog.move(tracked, State.GIVEN_UP, reason=reason, sent_bytes=tracked.sent_bytes)

    # May we write it?

    def _require_possible_sizes(self) -> None:
        most = largest_file_bytes(self._context.limits.known.max_parts)
        for file in self._checkpoint.files:
            if file.size_bytes > most:
                key = keys.shared_file(self._checkpoint.name, file.path)
                raise TooLarge(key, f"{file.size_bytes} bytes, at most {most}")

    async def _nobody_objects(self) -> bool:
        """Wait until it is known that this run may write the checkpoint, and let whatever else there is go first meanwhile.

        Returns:
            Whether it may: otherwise the checkpoint was given up, or written anew.
        """
        context, active, checkpoint = self._context, self._active, self._checkpoint
        while context.catalog.is_current(self._tracked):
            reason = await context.lease.objection(checkpoint.node, checkpoint.attempt)
            if reason is None:
                active.is_held = False
                return True
            if not active.is_held:
                log.warning("upload_waits", checkpoint=checkpoint.name, reason=reason)
                context.catalog.move(self._tracked, self._tracked.state, reason=reason)
            active.is_held = True
            context.news.set()
            await context.clock.sleep(COMMIT_POLL_S * max(1.0, checkpoint.node.count / 1000))
        return False

    async def _may_replace(self, existing: ExistingCommit, held: Held, there: StoredCommit) -> bool:
        decision = await existing.decide(self._checkpoint, held.contents, there)
        if not self._context.catalog.is_current(self._tracked):  # deleted, superseded or given up meanwhile
            return False
        match decision:
            case AlreadyCommitted():
                self._context.committer.found_equal(self._checkpoint, there)
                await self._durable(self._committed_at_s(there))
                self._post_commit_check.became_durable(self._tracked)
                return False
            case KeepExisting(reason, torn):
                self._context.catalog.move(self._tracked, State.REJECTED if torn else State.SUPERSEDED, reason=reason)
                return False
        return True

    async def _those_ahead_are_through(self) -> None:
        """Wait until uploads that go first, and only wait for their last answers, are committed; not once the pod is going."""
        while not self._context.is_going() and self._queue.ends_ahead(self._tracked):
            await self._queue.something_ended()

    # What came of it.

    async def _sweep(self) -> None:
        # The sweeper would take objects of a newer version, which is being sent now, for orphans.
        if not self._context.catalog.is_replaced(self._tracked):
            await self._context.committer.sweep(self._checkpoint)

    async def _durable(self, at_s: float) -> None:
        context, checkpoint = self._context, self._checkpoint
        context.catalog.durable(
            self._tracked,
            at_s=at_s,
            attempt=checkpoint.attempt,
            files=len(checkpoint.files),
            size_bytes=checkpoint.size_bytes,
            saved_to_durable_s=round(max(0.0, at_s - checkpoint.created_at_s), 3),
            retries=context.executor.retries,
            **self._took(),
        )
        journal = await self._versions.journal(checkpoint)
        context.deduplicator.committed(journal.entries.values(), journal.first_crcs)
        await self._abort_uploads(journal)
        self._let_go()

    def _recognise(self, restored_from: str, there: StoredCommit | None) -> None:
        if not self._context.catalog.is_current(self._tracked):  # deleted from the volume meanwhile
            return
        if there is not None and there.crc64nvme == restored_from:
            self._context.catalog.durable(self._tracked, at_s=self._committed_at_s(there), downloaded=True)
        else:
            reason = "it was downloaded, and its commit is no longer in the store"
            self._context.catalog.move(self._tracked, State.SUPERSEDED, reason=reason)

    async def _rest(self, error: SidecarError | OSError) -> None:
        """Let everything else go first for a while, longer after each failure; a pod that is going tries again at once."""
        context, active, tracked = self._context, self._active, self._tracked
        wait_s, reason = context.retry_waits.failed(tracked.name, tracked.version, error)
        self._restart(reason)
        active.is_sent, active.is_held = False, True
        context.news.set()
        self._queue.wake_those_behind()
        for _ in range(max(1, round(wait_s / COMMIT_POLL_S))):
            await context.executor.pause(COMMIT_POLL_S)
            if context.is_going() or not context.catalog.is_current(tracked):
                break

    def _restart(self, reason: str) -> None:
        if self._context.catalog.is_current(self._tracked):
            self._context.catalog.move(self._tracked, State.FINISHED, reason=reason)

    def _reject(self, reason: str) -> None:
        catalog, tracked = self._context.catalog, self._tracked
        if not catalog.is_current(tracked):  # superseded or given up meanwhile
            return
        if tracked.state is State.PAUSED:
            catalog.move(tracked, State.UPLOADING)
        catalog.move(tracked, State.REJECTED, reason=reason)

    def _examine_again(self, reason: str) -> None:
        catalog, tracked = self._context.catalog, self._tracked
        if not catalog.is_current(tracked):
            return
        if self._versions.has_no_marker(tracked.name):  # what was finished is destroyed, and nothing else is in its place
            reason = "its marker was removed and its files written over before it was durable"
            catalog.move(tracked, State.LOST, reason=reason)
        else:
            catalog.move(tracked, State.FINISHED, reason=reason)
            self._let_go()
            catalog.forget(tracked.name)
            self._versions.examine_again(tracked.name)

    async def _abort_uploads(self, journal: Journal) -> None:
        context = self._context
        for progress in (*journal.uploads.values(), *journal.void):
            try:
                await context.executor.once(context.store.abort_upload, progress.key, progress.upload_id)
            except StoreError as error:  # a later start, or the bucket's lifecycle rule, removes it
                log.warning("unfinished_upload_not_aborted", key=progress.key, error=str(error))

    def _let_go(self) -> None:
        self._versions.let_go(self._checkpoint)
        self._context.retry_waits.forget(self._checkpoint.version)
        self._context.reuploads.forget(self._checkpoint.version)

    def _took(self) -> dict[str, Any]:
        """Return how long sending took, for the log; nothing where this life of the sidecar sent nothing."""
        return {} if self._began_s is None else {"upload_s": round(self._context.clock.monotonic() - self._began_s, 3)}

    def _committed_at_s(self, there: StoredCommit) -> float:
        stamp = there.commit.committed_at if there.commit else None
        try:
            return epoch_seconds(stamp) if stamp else self._context.clock.epoch()
        except ContractError:
            return self._context.clock.epoch()
