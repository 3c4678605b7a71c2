"""Last steps of an upload: this node's manifest, then the commit (order of I3); revocation of commits (order of I4)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import structlog

from sidecar.core.commit.commit import (
    GONE,
    Decision,
    GiveWay,
    Object,
    ReadyToCommit,
    Reupload,
    Wait,
    attempt_of,
    commit_of,
    decide,
    manifest_entry,
    to_reupload,
    waiting_for,
)
from sidecar.core.commit.commit_roster import CommitTurn, groups, has_bundle, members, missing_nodes
from sidecar.core.format import keys
from sidecar.core.format.attempts import goes_after
from sidecar.core.format.found_checkpoint import Finished
from sidecar.core.format.manifest import MAX_DOCUMENT_BYTES, Commit, Manifest, decode_manifest, encode, too_large
from sidecar.errors import AlreadyExists, NeverDurable, NotFound, Stopped, Undeclared
from sidecar.lifecycle.lease import Lease
from sidecar.repository.documents import StoredCommit, is_of, named_in
from sidecar.store.protocol import Store, Stored
from sidecar.transfer.clock import Clock
from sidecar.transfer.executor import StoreExecutor
from sidecar.upload.commit.commit_poll import CommitPoll
from sidecar.upload.commit.manifest_collector import ManifestCollector, Read
from sidecar.upload.commit.revocation import Revocation
from sidecar.upload.commit.sweeper import Sweeper
from sidecar.upload.send.journal import Journal
from trainer_hook.contract import ContractError, Node, rfc3339

LEASE_VALID_S = 1.0
"""Seconds for which a read of the lease counts before a commit. It is older after a freeze of the process or slow reads."""

log = structlog.get_logger()

MAX_POLLS = 64
"""Maximum number of checkpoints that wait for their commit, and of the latest commits that this node knows as its own."""
BUNDLE_PATIENCE_S = 30.0
"""Extra seconds for which the other nodes of a group leave the commit to the node that has written its bundle."""


class _NotYet(Stopped):
    """The commit has to wait; the text is the reason."""


class Committer(Revocation):
    """Writes manifests and commits, and revokes commits."""

    def __init__(
        self, store: Store, executor: StoreExecutor, *, lease: Lease | None = None, clock: Clock | None = None
    ) -> None:
        """Start with nothing seen. ``lease``: checked before each commit and each deletion; ``None``: no other pod is there."""
        super().__init__(store, executor, lease=lease)
        self._clock = clock or Clock()
        self._polls: dict[tuple[str, str, str | None], CommitPoll] = {}
        self._written: deque[tuple[str, str, str | None]] = deque(maxlen=MAX_POLLS)
        """Latest saves whose commit this node wrote; it checks them afterwards."""
        self._equal: dict[tuple[str, str, str | None], str] = {}
        """Checksum of a commit of another save with the same content, by our save."""
        self._sweeper = Sweeper(store, executor)

    def record_equal_commit(self, checkpoint: Finished, stored: StoredCommit) -> None:
        """Record that a commit of another save has the content of a checkpoint, which is durable as long as that commit is."""
        self._equal[checkpoint.name, checkpoint.attempt, checkpoint.save_id] = stored.crc64nvme

    async def is_still_committed(self, checkpoint: Finished, *, thoroughly: bool) -> bool:
        """Whether a durable checkpoint is still durable: late requests of an earlier attempt may have damaged it.

        Args:
            checkpoint: A checkpoint that this node reported as durable.
            thoroughly: If this node wrote the commit, also check every object, and revoke a commit of damaged ones.
        """
        stored = await self.stored_commit(checkpoint.name)
        if stored is None or stored.commit is None:
            return await self._was_deleted(checkpoint)
        of = (checkpoint.name, checkpoint.attempt, checkpoint.save_id)
        if stored.crc64nvme == self._equal.get(of):
            return True
        part = await self.part(stored.commit, checkpoint.node)
        if part is None or not is_of(part, checkpoint):
            return stored.commit.attempt != checkpoint.attempt  # superseded by another attempt, not lost
        damaged = await self.damaged(stored.commit) if thoroughly and of in self._written else []
        if damaged:
            if (reason := await self.lease.reason_not_to_commit(checkpoint.node, checkpoint.attempt)) is not None:
                raise Undeclared(reason)
            log.error("commit_taken_back", checkpoint=checkpoint.name, damaged=damaged[:8], hint="it is uploaded again")
            await self.revoke_commit(checkpoint.name, judged=stored)
            return False
        return True

    async def _was_deleted(self, checkpoint: Finished) -> bool:
        """Whether a missing commit was deleted on purpose: by retention or an operator, or because the step is rewritten."""
        if checkpoint.node.count > 1 and checkpoint.save_id is None:
            # Without a save id, our old part could be committed together with new parts of other nodes.
            return True
        listing = await self._executor.persistently(self._listing, checkpoint.name)
        if not any(keys.shared_file(checkpoint.name, file.path) in listing for file in checkpoint.files):
            return True
        # A later attempt that is sending the step would revoke our commit again and again.
        return await self._later_attempt(checkpoint, listing) is not None

    async def is_untouched(self, name: str, *, attempt: str) -> bool:
        """Whether no commit and no manifest of another attempt in the store depends on the files of a step.

        Raises:
            StoreError: A request failed.
        """
        listed = await self._executor.once(lambda: [o.key for o in self._store.list(keys.folder(name))])
        ours = keys.manifests(name, attempt)
        documents = [key for key in listed if key.startswith(keys.manifests(name)) and not key.startswith(ours)]
        documents = [key for key in documents if not keys.is_of_commit_alone(key, name)]  # of a revoked one
        return keys.commit(name) not in listed and not documents

    async def remove_early_upload(self, sent: Journal, *, whole_files: bool) -> None:
        """Remove the early upload of a checkpoint that will not be finished.

        ``sent``: its journal. ``whole_files``: also delete complete objects, on which nothing depends; otherwise only abort
        multipart uploads.

        Raises:
            Fenced: A later pod of the job has taken the prefix over.
            StoreError: Not all of it could be removed.
        """
        for progress in (*sent.uploads.values(), *sent.void):
            await self._executor.once(self._store.abort_upload, progress.key, progress.upload_id)
        if sent.entries and whole_files:
            await self.lease.require_not_fenced()  # a later pod may be sending the step's files, before its first manifest
            await self._executor.once(self._store.delete, [entry.key for entry in sent.entries.values()])

    async def withdraw_earlier(self, checkpoint: Finished, before: Manifest | None) -> bool:
        """Delete this node's manifest of an earlier save of the step, before its files are overwritten (I4).

        To be called if the step has no commit.

        Returns:
            Whether there was one: then the other nodes may have committed it meanwhile.
        """
        if before is None or is_of(before, checkpoint):
            return False
        # Reading the manifest may have taken long, so the commit is read again.
        if await self.stored_commit(checkpoint.name) is not None:
            return True
        key = keys.manifest(checkpoint.name, checkpoint.attempt, checkpoint.node)
        await self.delete_while_uncommitted(checkpoint.name, [key])
        return True

    async def publish_manifest(self, manifest: Manifest) -> None:
        """Write this node's manifest: from then on its part counts as uploaded.

        Raises:
            NeverDurable: The manifest would exceed the maximum size of a document.
        """
        node, key, raw = Node(manifest.node.index, manifest.node.count), manifest.key, encode(manifest)
        if len(raw) > MAX_DOCUMENT_BYTES:
            raise NeverDurable(
                f"the manifest of its {len(manifest.files)} files has {len(raw)} bytes, the maximum is {MAX_DOCUMENT_BYTES}: "
                "save fewer and larger files"
            )
        if (after_s := CommitTurn(node).publish_after_s) > 0:
            await self._clock.sleep(after_s)
        stored = await self._put_manifest(key, raw)
        poll = self._start_poll(manifest.name, manifest.attempt, manifest.save_id, node)
        poll.collector.published(key, Read(stored.etag, raw, manifest))

    async def _put_manifest(self, key: str, raw: bytes) -> Stored:
        """Write a manifest. A late request of the first one replaces no later one, where the store takes conditions."""
        try:
            return await self._executor.persistently(self._store.put, key, raw, only_if_absent=True)
        except AlreadyExists:
            return await self._executor.persistently(self._store.put, key, raw)

    def _start_poll(self, name: str, attempt: str, save_id: str | None, node: Node) -> CommitPoll:
        collector = ManifestCollector(self._store, self._executor, name=name, attempt=attempt, node=node)
        while len(self._polls) >= MAX_POLLS:  # of checkpoints that were superseded while they waited
            del self._polls[next(iter(self._polls))]
        turn, now_s = CommitTurn(node), self._clock.monotonic()
        # The node that acts first lists at once; the others list when it is their turn.
        listed_s = float("-inf") if turn.is_eager or turn.position == 0 else now_s
        poll = self._polls[name, attempt, save_id] = CommitPoll(collector, turn, polled_s=now_s, listed_s=listed_s)
        return poll

    async def try_commit(self, checkpoint: Finished, *, poll_s: float | None = None) -> Decision:
        """Commit if nothing is missing and it is this node's turn; return the decision.

        Called periodically while it returns ``Wait``. ``core/commit/commit_roster`` limits the rate of requests.
        ``ReadyToCommit``: the step has a commit that names this node's part as published.

        Args:
            checkpoint: A checkpoint whose manifest this node has published.
            poll_s: Interval in seconds at which another node's commit is read; ``None``: by the number of nodes.
        """
        of = (checkpoint.name, checkpoint.attempt, checkpoint.save_id)
        poll = self._polls.get(of) or self._start_poll(*of, checkpoint.node)
        poll_s = poll.turn.poll_s if poll_s is None else poll_s
        poll.last = await self._poll(checkpoint, poll, self._clock.monotonic(), poll_s=poll_s)
        if not isinstance(poll.last, Wait):
            self._polls.pop(of, None)
        return poll.last

    async def _poll(self, checkpoint: Finished, poll: CommitPoll, now_s: float, *, poll_s: float) -> Decision:
        if checkpoint.node.count == 1:
            return await self._commit(checkpoint, poll)
        if now_s - poll.polled_s >= poll_s:
            poll.polled_s = now_s
            stored = await self.stored_commit(checkpoint.name)
            if stored is not None:
                return await self._compare_commit(checkpoint, poll, stored)
            poll.reads_reuploads = not poll.reads_reuploads and not poll.turn.is_eager
            if poll.reads_reuploads and (asked := await self._reupload_request(checkpoint, poll)) is not None:
                return asked
        if now_s - poll.listed_s < poll.turn.list_s:
            return poll.last
        poll.listed_s = now_s
        return await self._poll_group(checkpoint, poll, now_s)

    async def _reupload_request(self, checkpoint: Finished, poll: CommitPoll) -> Reupload | None:
        key = keys.manifest(checkpoint.name, checkpoint.attempt, checkpoint.node)
        return await poll.collector.reupload_request(await poll.collector.own(key))

    async def _poll_group(self, checkpoint: Finished, poll: CommitPoll, now_s: float) -> Decision:
        """List the manifests of the group, and merge or commit them if it is this node's turn."""
        name, attempt, node, turn = checkpoint.name, checkpoint.attempt, checkpoint.node, poll.turn
        prefix = keys.manifests_of_group(name, attempt, turn.group)
        listed = await self._executor.persistently(self._etags, prefix)
        missing = missing_nodes(name, attempt, members(turn.group, node.count), node.count, there=listed)
        if node.index in missing:
            return decide([], {}, me=node)
        if not poll.collector.is_published(keys.manifest(name, attempt, node), listed):
            return Reupload({}, "the manifest under this node's key is not the one that it published")
        if missing:
            poll.ready_since_s.clear()
            return waiting_for(missing, count=node.count)
        if not poll.is_our_turn("group", turn.position, now_s):
            return Wait("all nodes of its group have uploaded; one of them merges their manifests")
        if not turn.is_grouped:
            return await self._commit(checkpoint, poll)
        return await self._merge_group(checkpoint, poll, listed, now_s)

    async def _merge_group(self, checkpoint: Finished, poll: CommitPoll, listed: Mapping[str, str], now_s: float) -> Decision:
        """Write the bundle of our group; commit once all groups have theirs."""
        name, attempt, count, turn = checkpoint.name, checkpoint.attempt, checkpoint.node.count, poll.turn
        own = keys.bundle(name, attempt, turn.group, count)
        is_late = turn.position > 0 and not poll.bundled and own not in poll.ready_since_s
        if is_late and own in await self._executor.persistently(self._etags, own):
            poll.ready_since_s = {"group": now_s + BUNDLE_PATIENCE_S, own: now_s}
            return Wait("another node has merged the manifests of its group")
        if poll.bundled != listed:
            reads = await poll.collector.read(listed, members(turn.group, count))
            await poll.collector.write_bundle(own, reads)
            poll.bundled = dict(listed)
        merged = await self._executor.persistently(self._etags, keys.bundles(name, attempt))
        bundles = [keys.bundle(name, attempt, group, count) for group in groups(count)]
        missing = [group for group, key in enumerate(bundles) if key not in merged]
        # A group whose nodes died after their last manifest writes no bundle: its manifests are read one by one.
        if not poll.is_our_turn("all", len(groups(count)) if missing else turn.group, now_s):
            first = members(missing[0] if missing else 0, count)
            return Wait(f"waiting for nodes {first[0]} to {first[-1]} of {count}" if missing else "node 0 commits")
        return await self._commit(checkpoint, poll, bundles=[key for key in bundles if key in merged])

    async def _commit(self, checkpoint: Finished, poll: CommitPoll, *, bundles: Sequence[str] = ()) -> Decision:
        """Compare the listing of the objects with all manifests, and commit if nothing is missing."""
        name, attempt, node, asked_s = checkpoint.name, checkpoint.attempt, checkpoint.node, self._clock.monotonic()
        # Concurrently: then reading the lease takes no extra time.
        listed = self._executor.persistently(self._listing, name)
        listing, reason = await self._executor.together((listed, self.lease.reason_not_to_commit(node, attempt)))
        if keys.commit(name) in listing and (stored := await self.stored_commit(name)) is not None:
            return await self._compare_commit(checkpoint, poll, stored)
        if reason is not None:
            return Wait(reason)
        if bundles:
            await poll.collector.read_bundles(bundles)
        etags = {key: found.etag for key, found in listing.items()}
        reads = await poll.collector.read(etags, range(node.count))
        own = next((read for read in reads if read.manifest.node.index == node.index), None)
        if own is not None and not is_of(own.manifest, checkpoint):
            return Reupload({}, "a late request has replaced this node's manifest by an earlier one")
        manifests = [read.manifest for read in reads]
        decision = decide(manifests, listing, me=node)
        if isinstance(decision, ReadyToCommit):
            return await self._commit_parts(checkpoint, poll, reads, listing, asked_s)
        await self._request_reuploads(poll, manifests, listing, etags)
        if isinstance(decision, Reupload) and decision.reason == GONE:
            return await self._later_attempt(checkpoint, listing) or decision
        return decision

    async def _commit_parts(
        self, checkpoint: Finished, poll: CommitPoll, reads: Sequence[Read], listing: Mapping[str, Object], asked_s: float
    ) -> Decision:
        """Commit the parts of all nodes, unless another node has done so. ``asked_s``: as of ``_write_commit``."""
        name, attempt, node = checkpoint.name, checkpoint.attempt, checkpoint.node
        manifests, raw = [read.manifest for read in reads], {read.manifest.node.index: read.raw for read in reads}
        commit = commit_of(manifests, raw, committed_at=rfc3339(self._clock.epoch()), epoch=self.epoch_of(checkpoint))
        if has_bundle(node.count):
            await poll.collector.write_bundle(keys.all_manifests(name, attempt), reads)
        try:
            await self._write_commit(commit, node, asked_s, files=sum(len(manifest.files) for manifest in manifests))
        except _NotYet as error:
            return Wait(str(error))
        except AlreadyExists:
            stored = await self.stored_commit(name)
            found = await self._compare_commit(checkpoint, poll, stored) if stored else Wait("its commit was just revoked")
            if not isinstance(found, ReadyToCommit):
                return found
        self._written.append((name, attempt, checkpoint.save_id))
        self._sweeper.committed(checkpoint, manifests, listing)
        return ReadyToCommit()

    async def _write_commit(self, commit: Commit, node: Node, asked_s: float, *, files: int) -> None:
        """Write a commit. ``files``: their number in all manifests. ``asked_s``: when the lease was read, by the clock.

        Raises:
            AlreadyExists: The step has a commit.
            Fenced, NeverDurable, _NotYet: It must not be written, is more than a reader takes, or must not be written now.
        """

        async def check() -> None:
            if (reason := await self.lease.reason_not_to_commit(node, commit.attempt)) is not None:
                raise _NotYet(reason)

        if (why := too_large(commit, files=files)) is not None:
            raise NeverDurable(why)
        if self._clock.monotonic() - asked_s > LEASE_VALID_S:
            await check()
        # Written last: without this object the step is invisible (I1).
        put, key = self._store.put, keys.commit(commit.name)
        await self._executor.persistently(put, key, encode(commit), only_if_absent=True, before_again=check)

    async def _later_attempt(self, checkpoint: Finished, listing: Mapping[str, Object]) -> GiveWay | None:
        """Return ``GiveWay`` if a later attempt writes the step. Otherwise the two would repair the step in turns for ever."""
        name, ours = checkpoint.name, rfc3339(checkpoint.created_at_s)
        for key in listing:
            attempt = attempt_of(key, name)
            if attempt is None or attempt == checkpoint.attempt or not key.startswith(keys.manifests_of_nodes(name, attempt)):
                continue
            try:
                manifest = decode_manifest(await self._executor.persistently(self._store.get, key), key=key)
            except (NotFound, ContractError):
                continue
            theirs, is_later = manifest.created_at, self.lease.is_later(attempt, checkpoint.attempt)
            if is_later is None:
                is_later = theirs is not None and goes_after(attempt, theirs, checkpoint.attempt, ours)
            if is_later:
                return GiveWay(f"the later attempt {attempt} writes this step now")
        return None

    def epoch_of(self, checkpoint: Finished) -> int | None:
        """Return the epoch of the prefix under which a checkpoint was written; ``None``: unknown."""
        return None if checkpoint.is_inherited else self.lease.epoch_of(checkpoint.attempt)

    async def _request_reuploads(
        self, poll: CommitPoll, manifests: Sequence[Manifest], listing: Mapping[str, Object], etags: Mapping[str, str]
    ) -> None:
        save_ids = {m.save_id for m in manifests}
        if poll.turn.is_eager or len(save_ids) != 1 or len(manifests) < poll.turn.node.count:
            return
        if reuploads := to_reupload(manifests, listing):
            await poll.collector.request_reuploads(reuploads, etags)

    async def _compare_commit(self, checkpoint: Finished, poll: CommitPoll, stored: StoredCommit) -> ReadyToCommit | Reupload:
        """Return ``ReadyToCommit`` if an existing commit names this node's part as published."""
        key = keys.manifest(checkpoint.name, checkpoint.attempt, checkpoint.node)
        own = await poll.collector.own(key)
        if own is not None and is_of(own.manifest, checkpoint):
            commit, wanted = stored.commit, manifest_entry(own.manifest, own.raw)
            if commit is not None and named_in(commit, key) == wanted:
                return ReadyToCommit()
        return Reupload({}, "another save of this step was committed in the meantime")

    async def sweep(self, checkpoint: Finished) -> None:
        """Remove the orphans of earlier versions of a step, if this node committed it. Nothing depends on them."""
        await self._sweeper.sweep(checkpoint)

    def _etags(self, prefix: str) -> dict[str, str]:
        return {o.key: o.etag for o in self._store.list(prefix)}
