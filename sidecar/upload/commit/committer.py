"""The last steps of an upload: this node's manifest, then the commit, in the order of I3; and making way in that of I4."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from sidecar.core.commit.commit import (
    GONE,
    Decision,
    GiveWay,
    Object,
    Ready,
    Reupload,
    Wait,
    attempt_of,
    commit_of,
    decide,
    manifest_entry,
    to_reupload,
    waiting_for,
)
from sidecar.core.commit.commit_roster import EAGER_NODES, LOOK_S, CommitTurn, groups, members, missing_nodes
from sidecar.core.format import keys
from sidecar.core.format.attempts import goes_after
from sidecar.core.format.found_checkpoint import Finished
from sidecar.core.format.manifest import MAX_DOCUMENT_BYTES, FileEntry, Manifest, NodeOf, decode_manifest, encode
from sidecar.errors import AlreadyExists, CheckpointRejected, NotFound
from sidecar.repository.documents import Documents, StoredCommit, named_in
from sidecar.store.protocol import Store
from sidecar.transfer.executor import StoreExecutor
from sidecar.upload.commit.manifest_collector import ManifestCollector, Read
from sidecar.upload.commit.sweeper import Sweeper
from sidecar.upload.send.journal import Journal
from trainer_hook.contract import ContractError, Node, rfc3339

log = structlog.get_logger()

MOST_LOOKS = 64
DIGESTED_S = 30.0
"""How much longer to leave the rest to a node that has gathered the manifests of the group."""


def manifest_of(checkpoint: Finished, entries: Sequence[FileEntry]) -> Manifest:
    """Return the manifest of this node's part of a checkpoint."""
    return Manifest(
        name=checkpoint.name,
        step=checkpoint.step,
        attempt=checkpoint.attempt,
        save_id=checkpoint.save_id,
        node=NodeOf(index=checkpoint.node.index, count=checkpoint.node.count),
        reason=checkpoint.reason,
        created_at=rfc3339(checkpoint.created_at_s),
        world_size=checkpoint.world_size,
        meta=dict(checkpoint.meta),
        files=tuple(sorted(entries, key=lambda entry: entry.path)),
    )


@dataclass(slots=True)
class _Look:
    """What a node that has published its part of a checkpoint saw so far. Times are of the committer's clock."""

    collector: ManifestCollector
    turn: CommitTurn
    looked_s: float
    listed_s: float
    ready_since_s: dict[str, float] = field(default_factory=dict)
    """Since when something could be done, by what it is: whoever is first in the order gets the time to do it."""
    digested: dict[str, str] = field(default_factory=dict)
    """Etags of the manifests of the digest that this node wrote."""
    asks: bool = False
    """Whether the next look is at what is to be mended."""
    last: Decision = Wait("its manifest was published")  # noqa: RUF009 - frozen

    def is_our_turn(self, what: str, position: int, now_s: float) -> bool:
        """Whether those before us had their time."""
        return now_s - self.ready_since_s.setdefault(what, now_s) >= self.turn.patience_s(position)


class Fence(Protocol):
    """The lease of the prefix, as commits and deletions ask it."""

    async def require_held(self, node: Node | None = None, attempt: str | None = None) -> None:
        """Return if no later pod of the job has taken the prefix over.

        Raises:
            Fenced: One has.
        """
        ...


class Unfenced:
    """Fence of a store that nobody else uses."""

    async def require_held(self, node: Node | None = None, attempt: str | None = None) -> None:
        """Return at once."""


class Committer(Documents):
    """Also writes them: manifests, and the commit when it is time."""

    def __init__(
        self,
        store: Store,
        executor: StoreExecutor,
        *,
        fence: Fence | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        epoch: Callable[[], float] = time.time,
    ) -> None:
        """Start with nothing seen. ``fence``: asked before each commit and each deletion; ``None``: no other pod is there."""
        super().__init__(store, executor)
        self.fence = fence or Unfenced()
        self._clock = clock
        self._epoch = epoch
        self._sleep = sleep
        self._looks: dict[tuple[str, str, str | None], _Look] = {}
        self._written: set[tuple[str, str, str | None]] = set()
        """Whose commits this node wrote: it is the one that looks after them."""
        self._equal: dict[tuple[str, str, str | None], str] = {}
        """Checksum of the commit of another writing that has the content of one of ours."""
        self._sweeper = Sweeper(store, executor)

    async def already_there(self, checkpoint: Finished) -> tuple[StoredCommit | None, Manifest | None]:
        """Return the commit of a step, and this node's own manifest of it, read at the same time; ``None``: there is none."""
        works: list[Coroutine[Any, Any, Any]] = [self.stored_commit(checkpoint.name), self.own_manifest(checkpoint)]
        there, before = await self._executor.together(works)
        return there, before

    def found_equal(self, checkpoint: Finished, there: StoredCommit) -> None:
        """Take note that a commit of another writing holds what a checkpoint does: that is durable while this one stands."""
        self._equal[checkpoint.name, checkpoint.attempt, checkpoint.save_id] = there.crc64nvme

    async def still_stands(self, checkpoint: Finished, *, thoroughly: bool) -> bool:
        """Whether what was durable is durable yet: a pod of an earlier attempt may have hit it with its last requests.

        Args:
            checkpoint: What this node said was durable.
            thoroughly: Where this node wrote the commit, also look at every object; a commit that names what is not there is
                taken back.
        """
        there = await self.stored_commit(checkpoint.name)
        if there is None or there.commit is None:
            return await self._was_deleted(checkpoint)
        of = (checkpoint.name, checkpoint.attempt, checkpoint.save_id)
        if there.crc64nvme == self._equal.get(of):
            return True
        part = await self.part(there.commit, checkpoint.node)
        if part is None or not _is_of(part, checkpoint):
            return there.commit.attempt != checkpoint.attempt  # superseded, which is no loss
        if thoroughly and of in self._written and (damaged := await self.damaged(there.commit)):
            log.error("commit_taken_back", checkpoint=checkpoint.name, damaged=damaged[:8], hint="it is sent again")
            await self.revoke_commit(checkpoint.name, judged=there)
            return False
        return True

    async def _was_deleted(self, checkpoint: Finished) -> bool:
        """Whether a commit that is gone is none of our business: somebody deleted the step, or may be writing it anew."""
        if checkpoint.node.count > 1 and checkpoint.save_id is None:
            # Without the name of the writing, our part could be committed with the new parts of others.
            return True
        listing = await self._executor.persistently(self._listing, checkpoint.name)
        return not any(keys.shared_file(checkpoint.name, file.path) in listing for file in checkpoint.files)

    async def is_untouched(self, name: str, *, attempt: str) -> bool:
        """Whether nothing in the store depends on the files of a step but what this attempt has written.

        Raises:
            StoreError: It cannot be known now.
        """
        there = await self._executor.once(lambda: [o.key for o in self._store.list(keys.folder(name))])
        ours = keys.manifests(name, attempt)
        documents = [key for key in there if key.startswith(keys.manifests(name)) and not key.startswith(ours)]
        documents = [key for key in documents if not keys.is_quarantine(key, name)]  # of a commit that was taken back
        return keys.commit(name) not in there and not documents

    async def discard(self, sent: Journal, *, whole_files: bool) -> None:
        """Remove from the store what was sent of a checkpoint that will not be finished.

        Args:
            sent: What that was.
            whole_files: Also the objects, which nothing depends on; otherwise only uploads that were not completed.

        Raises:
            StoreError: Not all of it could be removed.
        """
        for progress in (*sent.uploads.values(), *sent.void):
            await self._executor.once(self._store.abort_upload, progress.key, progress.upload_id)
        if sent.entries and whole_files:
            await self._executor.once(self._store.delete, [entry.key for entry in sent.entries.values()])

    async def revoke_commit(self, name: str, *, judged: StoredCommit | None = None) -> bool:
        """Take back what is committed, so that the step can be written anew: the commit, then the manifests it names (I4).

        Manifests that it does not name are somebody's work in progress: other nodes of our attempt publish theirs while
        we are still at it.

        Args:
            name: The checkpoint.
            judged: The commit that was found to have to go. Judging takes time, and another one that stands now stays.

        Returns:
            Whether the way is free.

        Raises:
            Fenced: A later pod of the job has taken the prefix over.
        """
        await self.fence.require_held()
        there = await self.stored_commit(name)
        if there is None:
            return True
        if judged is not None and judged.crc64nvme != there.crc64nvme:
            return False

        async def look() -> None:  # a try before may have succeeded, and others have committed since
            now = await self.stored_commit(name)
            if now is not None and now.crc64nvme != there.crc64nvme:
                raise AlreadyExists(keys.commit(name))

        try:
            await self._executor.persistently(self._store.delete, [keys.commit(name)], before_again=look)
        except AlreadyExists:
            return False
        await self.delete_while_uncommitted(name, await self._named_by(name, there))
        return True

    async def withdraw_earlier(self, checkpoint: Finished, before: Manifest | None) -> bool:
        """Take back this node's manifest of an earlier writing of the step, before its files are written over (I4).

        Call it where no commit stands.

        Returns:
            Whether there was one: the other nodes may have committed it meanwhile.
        """
        if before is None or _is_of(before, checkpoint):
            return False
        # Reading it may have taken long: the look at the commit that came before it does not count any more.
        if await self.stored_commit(checkpoint.name) is not None:
            return True
        key = keys.manifest(checkpoint.name, checkpoint.attempt, checkpoint.node)
        await self.delete_while_uncommitted(checkpoint.name, [key])
        return True

    async def delete_while_uncommitted(self, name: str, objects: Sequence[str]) -> None:
        """Delete objects of a checkpoint. Each further try looks at the commit first: what a commit names now stays.

        Raises:
            AlreadyExists: The step was committed anew meanwhile.
        """

        async def look() -> None:
            if await self.stored_commit(name) is not None:  # committed while the store did not answer: to be judged anew
                raise AlreadyExists(keys.commit(name))

        await self._executor.persistently(self._store.delete, objects, before_again=look)

    async def publish_manifest(self, manifest: Manifest) -> None:
        """Write this node's manifest: from now on its part counts as uploaded.

        Raises:
            CheckpointRejected: It would be larger than what is read again.
        """
        node = Node(manifest.node.index, manifest.node.count)
        key = keys.manifest(manifest.name, manifest.attempt, node)
        raw = encode(manifest)
        if len(raw) > MAX_DOCUMENT_BYTES:
            raise CheckpointRejected(
                f"its {len(manifest.files)} files take a manifest of {len(raw)} bytes, {MAX_DOCUMENT_BYTES} are read at most: "
                "save fewer and larger files"
            )
        if (after_s := CommitTurn(node).publish_after_s) > 0:
            await self._sleep(after_s)
        stored = await self._executor.persistently(self._store.put, key, raw)
        look = self._begin_looking(manifest.name, manifest.attempt, manifest.save_id, node)
        look.collector.published(key, Read(stored.etag, raw, manifest))

    def _begin_looking(self, name: str, attempt: str, save_id: str | None, node: Node) -> _Look:
        collector = ManifestCollector(self._store, self._executor, name=name, attempt=attempt, node=node)
        while len(self._looks) >= MOST_LOOKS:  # of checkpoints that were superseded while they waited
            del self._looks[next(iter(self._looks))]
        turn, now_s = CommitTurn(node), self._clock()
        # Who acts first looks at once; the others need not see what is there before it is their turn.
        listed_s = float("-inf") if turn.is_eager or turn.position == 0 else now_s
        look = self._looks[name, attempt, save_id] = _Look(collector, turn, looked_s=now_s, listed_s=listed_s)
        return look

    async def try_commit(self, checkpoint: Finished, *, hurried: bool = False) -> Decision:
        """Commit if nothing is missing and it is this node's turn, and say what is otherwise.

        Called again and again while it says ``Wait``; it asks the store no more often than ``core/commit/commit_roster`` wants.
        ``Ready`` says that a commit stands that names this node's part as it was published.

        Args:
            checkpoint: Whose manifest this node has published.
            hurried: The pod is going: it looks whether others have committed as often as in a small job.
        """
        of = (checkpoint.name, checkpoint.attempt, checkpoint.save_id)
        look = self._looks.get(of) or self._begin_looking(*of, checkpoint.node)
        look.last = await self._look(checkpoint, look, self._clock(), look_s=LOOK_S if hurried else look.turn.look_s)
        if not isinstance(look.last, Wait):
            self._looks.pop(of, None)
        return look.last

    async def _look(self, checkpoint: Finished, look: _Look, now_s: float, *, look_s: float) -> Decision:
        if checkpoint.node.count == 1:
            return await self._commit(checkpoint, look)
        if now_s - look.looked_s >= look_s:
            look.looked_s = now_s
            there = await self.stored_commit(checkpoint.name)
            if there is not None:
                return await self._found(checkpoint, look, there)
            look.asks = not look.asks and not look.turn.is_eager
            if look.asks and (asked := await self._asked_to_mend(checkpoint, look)) is not None:
                return asked
        if now_s - look.listed_s < look.turn.list_s:
            return look.last
        look.listed_s = now_s
        return await self._look_at_group(checkpoint, look, now_s)

    async def _asked_to_mend(self, checkpoint: Finished, look: _Look) -> Reupload | None:
        key = keys.manifest(checkpoint.name, checkpoint.attempt, checkpoint.node)
        return await look.collector.asked_to_mend(await look.collector.own(key))

    async def _look_at_group(self, checkpoint: Finished, look: _Look, now_s: float) -> Decision:
        """See which manifests of the group are there, and act on it when it is our turn."""
        name, attempt, node, turn = checkpoint.name, checkpoint.attempt, checkpoint.node, look.turn
        prefix = keys.manifests_of_group(name, attempt, turn.group)
        listed = await self._executor.persistently(self._etags, prefix)
        missing = missing_nodes(name, attempt, members(turn.group, node.count), node.count, there=listed)
        if node.index in missing:
            return decide([], {}, me=node)
        if not look.collector.is_published(keys.manifest(name, attempt, node), listed):
            return Reupload({}, "something else lies under the key of this node's manifest")
        if missing:
            look.ready_since_s.clear()
            return waiting_for(missing, count=node.count)
        if not look.is_our_turn("group", turn.position, now_s):
            return Wait("all nodes of its group have uploaded; one of them sees to the rest")
        if not turn.is_grouped:
            return await self._commit(checkpoint, look)
        return await self._gather(checkpoint, look, listed, now_s)

    async def _gather(self, checkpoint: Finished, look: _Look, listed: Mapping[str, str], now_s: float) -> Decision:
        """Put the manifests of our group into one object; commit when all groups have."""
        name, attempt, count, turn = checkpoint.name, checkpoint.attempt, checkpoint.node.count, look.turn
        own = keys.digest(name, attempt, turn.group, count)
        is_late = turn.position > 0 and not look.digested and own not in look.ready_since_s
        if is_late and own in await self._executor.persistently(self._etags, own):
            look.ready_since_s = {"group": now_s + DIGESTED_S, own: now_s}
            return Wait("another node has gathered the manifests of its group")
        if look.digested != listed:
            reads = await look.collector.read(listed, members(turn.group, count))
            await look.collector.write_digest(own, reads)
            look.digested = dict(listed)
        there = await self._executor.persistently(self._etags, keys.digests(name, attempt))
        digests = [keys.digest(name, attempt, group, count) for group in groups(count)]
        missing = [group for group, key in enumerate(digests) if key not in there]
        # A group that died after its last manifest gathers nothing: its manifests are read one by one.
        may_be_dead = turn.patience_s(len(groups(count)) if missing else turn.group)
        if now_s - look.ready_since_s.setdefault("all", now_s) < may_be_dead:
            first = members(missing[0] if missing else 0, count)
            return Wait(f"waiting for nodes {first[0]} to {first[-1]} of {count}" if missing else "node 0 sees to the rest")
        return await self._commit(checkpoint, look, digests=[key for key in digests if key in there])

    async def _commit(self, checkpoint: Finished, look: _Look, *, digests: Sequence[str] = ()) -> Decision:
        """Compare what is there with all manifests, and commit if nothing is missing."""
        name, attempt, node = checkpoint.name, checkpoint.attempt, checkpoint.node
        # At the same time: the question costs no time beside the listing.
        asked: list[Coroutine[Any, Any, Any]] = [
            self._executor.persistently(self._listing, name),
            self.fence.require_held(node, attempt),
        ]
        listing, _ = await self._executor.together(asked)
        if keys.commit(name) in listing and (there := await self.stored_commit(name)) is not None:
            return await self._found(checkpoint, look, there)
        if digests:
            await look.collector.read_digests(digests)
        etags = {key: there.etag for key, there in listing.items()}
        reads = await look.collector.read(etags, range(node.count))
        own = next((read for read in reads if read.manifest.node.index == node.index), None)
        if own is not None and not _is_of(own.manifest, checkpoint):
            return Reupload({}, "a late request has put an earlier manifest over this node's own")
        manifests, raw = [read.manifest for read in reads], {read.manifest.node.index: read.raw for read in reads}
        decision = decide(manifests, listing, me=node)
        if not isinstance(decision, Ready):
            await self._ask_to_mend(look, manifests, listing, etags)
            if isinstance(decision, Reupload) and decision.reason == GONE:
                return await self._later_attempt(checkpoint, listing) or decision
            return decision
        commit = commit_of(manifests, raw, committed_at=rfc3339(self._epoch()))
        if node.count > EAGER_NODES:
            await look.collector.write_digest(keys.all_manifests(name, attempt), reads)
        try:
            # Last on purpose: until this object exists the step is invisible (I1).
            await self._executor.persistently(self._store.put, keys.commit(name), encode(commit), only_if_absent=True)
        except AlreadyExists:
            there = await self.stored_commit(name)
            found = await self._found(checkpoint, look, there) if there else Wait("its commit was just taken back")
            if not isinstance(found, Ready):
                return found
        self._written.add((name, attempt, checkpoint.save_id))
        self._sweeper.committed(checkpoint, manifests, listing)
        return decision

    async def _later_attempt(self, checkpoint: Finished, listing: Mapping[str, Object]) -> GiveWay | None:
        """Return that a later attempt writes the step, if one does: two that mend in turns would never come to an end."""
        name, ours = checkpoint.name, rfc3339(checkpoint.created_at_s)
        for key in listing:
            attempt = attempt_of(key, name)
            if attempt in (None, checkpoint.attempt) or not key.startswith(keys.manifests_of_nodes(name, attempt)):
                continue
            try:
                manifest = decode_manifest(await self._executor.persistently(self._store.get, key), key=key)
            except (NotFound, ContractError):
                continue
            theirs = manifest.created_at
            if theirs is not None and goes_after(attempt, theirs, checkpoint.attempt, ours):
                return GiveWay(f"attempt {attempt} is the later one of this step, and writes it now")
        return None

    async def _ask_to_mend(
        self, look: _Look, manifests: Sequence[Manifest], listing: Mapping[str, Object], etags: Mapping[str, str]
    ) -> None:
        same = {m.save_id for m in manifests}
        if look.turn.is_eager or len(same) != 1 or len(manifests) < look.turn.node.count:
            return
        if mending := to_reupload(manifests, listing):
            await look.collector.ask_to_mend(mending, etags)

    async def _found(self, checkpoint: Finished, look: _Look, there: StoredCommit) -> Ready | Reupload:
        """Return whether a commit that stands names this node's part as it was published."""
        key = keys.manifest(checkpoint.name, checkpoint.attempt, checkpoint.node)
        own = await look.collector.own(key)
        if own is not None and _is_of(own.manifest, checkpoint):
            commit, wanted = there.commit, manifest_entry(own.manifest, own.raw)
            if commit is not None and named_in(commit, key) == wanted:
                return Ready()
        return Reupload({}, "another writing of this step was committed in the meantime")

    async def sweep(self, checkpoint: Finished) -> None:
        """Remove what an earlier version of a step left, where this node committed it. Nothing depends on it."""
        await self._sweeper.sweep(checkpoint)

    def _etags(self, prefix: str) -> dict[str, str]:
        return {o.key: o.etag for o in self._store.list(prefix)}


def _is_of(manifest: Manifest, checkpoint: Finished) -> bool:
    """Whether a manifest is of this very writing of a checkpoint."""
    return (manifest.save_id, manifest.created_at) == (checkpoint.save_id, rfc3339(checkpoint.created_at_s))


__all__ = ["Committer", "Ready", "Reupload", "StoredCommit", "Wait", "manifest_of"]
