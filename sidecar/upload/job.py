"""One checkpoint from finished to durable, as one coroutine, with the handling of each error."""

from __future__ import annotations

import contextlib
from typing import Any

import structlog

from sidecar.core.commit.commit import GiveWay, ReadyToCommit, Reupload, Wait, manifest_of
from sidecar.core.commit.commit_roster import SHORTEST_POLL_S
from sidecar.core.commit.rewrite import AlreadyCommitted, KeepExisting
from sidecar.core.format import keys
from sidecar.core.format.attempts import seconds
from sidecar.core.format.manifest import Manifest
from sidecar.core.lifecycle.states import DISCARDED, State
from sidecar.core.schedule.parts import largest_file_bytes
from sidecar.errors import (
    CheckpointChanged,
    CheckpointRejected,
    Fenced,
    NeverDurable,
    StoreError,
    TooLarge,
    UnreadableFile,
    Unstorable,
)
from sidecar.repository.documents import StoredCommit
from sidecar.upload.commit.existing_commit import ExistingCommit
from sidecar.upload.commit.overwrite_guard import Outdated, OverwriteGuard
from sidecar.upload.commit.post_commit_check import PostCommitCheck
from sidecar.upload.context import UploadContext
from sidecar.upload.schedule.queue import Active, Queue, Wake
from sidecar.upload.send.journal import Journal
from sidecar.upload.versions import Held, Versions

log = structlog.get_logger()

COMMIT_POLL_S = 1.0
"""Poll interval in seconds of an upload that waits for manifests of other nodes, or for the lease of the prefix."""

REPLACED_POLL_S = 0.1
"""Poll interval in seconds of an upload while the version that it replaces is being committed."""


class UploadJob:
    """Upload of one version of a checkpoint. Store, clock and files are passed in."""

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
        """Start of sending, monotonic seconds; ``None``: nothing was sent by this process."""
        self._has_let_go = False
        """Whether this job has released links and journal. Any that exist now belong to another upload of this version."""

    async def run(self) -> None:
        """Upload the checkpoint. Afterwards it is durable, waits for other nodes, is given up, or is queued again."""
        tracked, catalog = self._tracked, self._context.catalog
        try:
            await self._upload_and_commit()
        except CheckpointChanged as error:
            await self._examine_again(str(error))
        except CheckpointRejected as error:
            self._move(State.LOST, str(error))
        except Fenced as error:
            await self._give_up_unless_committed(str(error))
        except Outdated as error:
            log.warning("upload_starts_again", checkpoint=tracked.name, error=str(error))
            self._move(State.FINISHED, str(error))
        except (Unstorable, NeverDurable) as error:
            self.reject(str(error))
        except (StoreError, UnreadableFile, OSError) as error:
            # A multipart upload vanished, bytes were corrupted, the disk failed: verified parts are kept.
            await self._back_off(error)
        except Exception as error:
            self._context.report_defect(tracked.name, error)
            await self._back_off(error)
        if catalog.is_replaced(tracked) or tracked.state in DISCARDED:
            await self.discard()
        self._queue.end(self._active)
        self._context.news.set()

    async def _upload_and_commit(self) -> None:
        context, checkpoint, committer = self._context, self._checkpoint, self._context.committer
        # Permission to write.
        while self._queue.committing == checkpoint.name:  # the commit of a replaced version reads the manifest under our key
            await context.clock.sleep(REPLACED_POLL_S)
        self._require_possible_sizes()
        # A downloaded checkpoint is not written. Its attempt is an earlier one, which must not become one of this pod's.
        if checkpoint.restored_from is None and not await self._wait_for_permission():
            return
        name, attempt, save_id = checkpoint.name, checkpoint.attempt, checkpoint.save_id
        guard = OverwriteGuard(committer, name, attempt, save_id, node=checkpoint.node, clock=context.clock)
        stored, earlier = await self._stored_before(guard)
        if checkpoint.restored_from is not None:
            self._recognize_download(checkpoint.restored_from, stored)
            return
        # Hold its files, and take over its early upload.
        held = await self._versions.hold(checkpoint)
        async with self._versions.taken_over(self._active, checkpoint) as sent:
            # Adopt objects that an earlier process of this sidecar sent.
            existing = ExistingCommit(committer, context.executor, context.quarantine)
            if stored is not None and not await self._may_replace(existing, held, stored):
                return
            damaged = context.reuploads.damaged(checkpoint.version)
            await existing.adopt(checkpoint, held.contents, sent.journal, earlier, but=damaged)
            # Send the rest.
            self._began_s = context.clock.monotonic()
            if not context.catalog.is_current(self._tracked):
                return
            entries = await self._versions.send(self._active, checkpoint, held, sent, guard)
        # Wait for commits of higher priority, publish the manifest, commit.
        await self._wait_for_earlier_commits()
        if context.catalog.is_current(self._tracked):
            if self._tracked.state is State.PAUSED:
                context.catalog.move(self._tracked, State.UPLOADING)
            await committer.publish_manifest(manifest_of(checkpoint, entries))
            context.reuploads.published(checkpoint.version)
            if context.catalog.is_current(self._tracked):  # otherwise superseded or given up meanwhile
                context.catalog.move(self._tracked, State.UPLOADED, **self._upload_duration())
                await self.commit()

    async def commit(self, *, reads_now: bool = False) -> None:
        """Commit, if nothing is missing and it is this node's turn. This node's manifest must be published.

        Called periodically while the checkpoint is ``UPLOADED``, that is while it waits for other nodes.

        ``reads_now``: read another node's commit at once, regardless of the poll interval.

        Raises:
            NeverDurable: No commit of it can be written.
            StoreError: A request failed.
        """
        context, tracked, checkpoint = self._context, self._tracked, self._checkpoint
        in_flush_s = SHORTEST_POLL_S if context.deadline.is_set() else None  # as often as in a small job
        poll_s = 0.0 if reads_now else in_flush_s
        decision = await context.committer.try_commit(checkpoint, poll_s=poll_s)
        at_s = context.clock.epoch()
        # During a flush, the report of the commit comes first.
        if isinstance(decision, ReadyToCommit) and not context.deadline.is_set():
            await self._sweep()
        if tracked.state is not State.UPLOADED or context.catalog.is_replaced(tracked):  # given up or finished anew meanwhile
            return
        match decision:
            case ReadyToCommit():
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
                if not context.catalog.is_current(tracked):
                    return
                for path in files:
                    journal.dropped(path)
                journal.close()
                context.reuploads.ask(checkpoint, files)
                context.catalog.move(tracked, State.FINISHED, reason=reason)

    async def discard(self) -> None:
        """Abort the multipart uploads of a checkpoint that will not be sent, and release its files."""
        if not self._has_let_go:
            try:
                await self._abort_uploads(await self._versions.journal(self._checkpoint))
            finally:  # also after a cancellation, or where no thread can be started: nothing else releases them
                self._let_go()

    def give_up(self, reason: str) -> None:
        """Stop sending and committing the checkpoint; sent parts stay for a later process."""
        catalog, tracked = self._context.catalog, self._tracked
        if catalog.is_current(tracked):
            catalog.move(tracked, State.GIVEN_UP, reason=reason, sent_bytes=tracked.sent_bytes)

    async def _give_up_unless_committed(self, reason: str) -> None:
        """Give up a checkpoint of a fenced pod, unless another node has committed it or a later attempt supersedes it."""
        context = self._context
        if self._checkpoint.node.count > 1:
            with contextlib.suppress(StoreError):
                found = await context.committer.is_committed(self._checkpoint)
                if found and context.catalog.is_current(self._tracked):
                    await self._durable(context.clock.epoch())
        if context.catalog.is_current(self._tracked) and context.catalog.is_abandoned_part(self._tracked):
            context.catalog.move(self._tracked, State.SUPERSEDED, reason=reason)
        self.give_up(reason)

    def reject(self, reason: str) -> None:
        """Reject the checkpoint for a reason that only a new version of it can remove."""
        catalog, tracked = self._context.catalog, self._tracked
        if not catalog.is_current(tracked):  # superseded or given up meanwhile
            return
        if tracked.state is State.PAUSED:
            catalog.move(tracked, State.UPLOADING)
        catalog.move(tracked, State.REJECTED, reason=reason)

    # Permission to write.

    async def _stored_before(self, guard: OverwriteGuard) -> tuple[StoredCommit | None, Manifest | None]:
        """Return the commit of the step, and this node's earlier manifest of it."""
        executor, committer, checkpoint = self._context.executor, self._context.committer, self._checkpoint
        stored, earlier = await executor.together(
            (committer.stored_commit(checkpoint.name), committer.own_manifest(checkpoint))
        )
        is_new = stored is None and checkpoint.restored_from is None
        if is_new and await committer.withdraw_earlier(checkpoint, earlier):
            stored = await committer.stored_commit(checkpoint.name)
        guard.repairs = stored is not None
        return stored, earlier

    def _require_possible_sizes(self) -> None:
        most = largest_file_bytes(self._context.limits.known.max_parts)
        for file in self._checkpoint.files:
            if file.size_bytes > most:
                key = keys.shared_file(self._checkpoint.name, file.path)
                raise TooLarge(key, f"{file.size_bytes} bytes, at most {most}")

    async def _wait_for_permission(self, *, replaces: bool = False) -> bool:
        """Wait until the lease permits this run to write the checkpoint; other uploads have priority meanwhile.

        ``replaces``: the upload may revoke a commit. Then the lease has to permit a commit, too, which takes the epoch of the
        checkpoint's attempt.

        Returns:
            False if the checkpoint was given up or rewritten first.
        """
        context, active, checkpoint = self._context, self._active, self._checkpoint
        while context.catalog.is_current(self._tracked):
            if replaces and checkpoint.is_inherited:  # its attempt is not declared any more
                reason = await context.lease.reason_not_to_commit(checkpoint.node, checkpoint.attempt)
            else:
                reason = await context.lease.reason_not_to_upload(checkpoint.node, checkpoint.attempt, until_declared=replaces)
            if reason is None:
                active.is_deferred = False
                return True
            if not active.is_deferred:
                log.warning("upload_waits", checkpoint=checkpoint.name, reason=reason)
                self._move(self._tracked.state, reason)
            active.is_deferred = True
            context.news.set()
            await context.clock.sleep(COMMIT_POLL_S * max(1.0, checkpoint.node.count / 1000))
        return False

    async def _may_replace(self, existing: ExistingCommit, held: Held, stored: StoredCommit) -> bool:
        """Whether the checkpoint is to be sent, although its step is committed: the commit is revoked then."""
        checkpoint = self._checkpoint
        comparison = await existing.compare(checkpoint, held.contents, stored)
        if comparison.needs_permission and not await self._wait_for_permission(replaces=True):
            return False
        decision = await existing.conclude(comparison)
        if not self._context.catalog.is_current(self._tracked):  # deleted, superseded or given up meanwhile
            return False
        match decision:
            case AlreadyCommitted():
                self._context.committer.record_equal_commit(checkpoint, stored)
                await self._durable(self._committed_at_s(stored))
                self._post_commit_check.became_durable(self._tracked)
                return False
            case KeepExisting(reason, torn):
                self._context.catalog.move(self._tracked, State.REJECTED if torn else State.SUPERSEDED, reason=reason)
                return False
        self._context.catalog.revoked(checkpoint.name)
        return True

    async def _wait_for_earlier_commits(self) -> None:
        """Wait until higher-priority uploads whose last requests are in flight are committed; skip it during a flush."""
        wake: Wake | None = None
        while not self._context.deadline.is_set() and self._queue.has_ending_ahead(self._tracked, wake):
            wake = await self._queue.upload_ended()

    # Outcome.

    async def _sweep(self) -> None:
        # To the sweeper, objects of a newer version that is being sent look like orphans.
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
            **self._upload_duration(),
        )
        try:
            journal = await self._versions.journal(checkpoint)
            context.deduplicator.committed(list(journal.entries.values()), journal.first_crcs)
            await self._abort_uploads(journal)
        finally:  # as in ``discard``
            self._let_go()

    def _recognize_download(self, restored_from: str, stored: StoredCommit | None) -> None:
        if not self._context.catalog.is_current(self._tracked):  # deleted from the volume meanwhile
            return
        if stored is not None and stored.crc64nvme == restored_from:
            self._context.catalog.durable(self._tracked, at_s=self._committed_at_s(stored), downloaded=True)
        else:
            reason = "it was downloaded, and its commit is no longer in the store"
            self._context.catalog.move(self._tracked, State.SUPERSEDED, reason=reason)

    async def _back_off(self, error: Exception) -> None:
        """Give other uploads priority for a while, longer after each failure. During a flush it is retried at once.

        While the store is away, all wait for its answer, and the newest one begins then.
        """
        context, active, tracked = self._context, self._active, self._tracked
        if context.executor.waits_for_store:
            self._move(State.FINISHED, f"{error}; it is sent once the store answers")
            active.is_sent = False
            await self._wait_for_store()
            return
        wait_s, reason = context.retry_waits.failed(tracked.name, tracked.version, error)
        self._move(State.FINISHED, reason)
        active.is_sent, active.is_deferred = False, True
        context.news.set()
        self._queue.wake_waiting()
        for _ in range(max(1, round(wait_s / COMMIT_POLL_S))):
            await context.executor.pause(COMMIT_POLL_S)
            if context.deadline.is_set() or not context.catalog.is_current(tracked):
                break

    async def _wait_for_store(self) -> None:
        while self._context.executor.waits_for_store and self._context.catalog.is_current(self._tracked):
            await self._context.executor.pause(COMMIT_POLL_S, is_outage=True)

    def _move(self, state: State, reason: str) -> None:
        """Change its state, unless it was replaced or decided meanwhile."""
        if self._context.catalog.is_current(self._tracked):
            self._context.catalog.move(self._tracked, state, reason=reason)

    async def _examine_again(self, reason: str) -> None:
        catalog, tracked, journal = self._context.catalog, self._tracked, await self._versions.journal(self._checkpoint)
        if not catalog.is_current(tracked):
            return
        if self._versions.has_no_marker(tracked.name):  # the finished files are destroyed, and no new version replaces them
            reason = "its marker was removed and its files written over before it was durable"
            catalog.move(tracked, State.LOST, reason=reason)
        else:
            catalog.move(tracked, State.FINISHED, reason=reason)
            self._let_go()
            catalog.forget(tracked.name)
            self._versions.examine_again(tracked.name)
            await self._abort_uploads(journal)

    async def _abort_uploads(self, journal: Journal) -> None:
        context = self._context
        for progress in (*journal.uploads.values(), *journal.void):
            try:
                await context.executor.once(context.store.abort_upload, progress.key, progress.upload_id)
            except StoreError as error:  # a later start, or the bucket's lifecycle rule, removes it
                log.warning("unfinished_upload_not_aborted", key=progress.key, error=str(error))

    def _let_go(self) -> None:
        self._has_let_go = True
        self._versions.let_go(self._checkpoint)
        self._context.retry_waits.forget(self._checkpoint.version)
        self._context.reuploads.forget(self._checkpoint.version)

    def _upload_duration(self) -> dict[str, Any]:
        """Return the log field with the duration of sending; empty if this process sent nothing."""
        return {} if self._began_s is None else {"upload_s": round(self._context.clock.monotonic() - self._began_s, 3)}

    def _committed_at_s(self, stored: StoredCommit) -> float:
        stamp = stored.commit.committed_at if stored.commit else None
        at_s = seconds(stamp or "")
        return self._context.clock.epoch() if at_s is None else at_s
