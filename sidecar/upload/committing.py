"""The last steps of an upload: this node's manifest, then the commit, in the order of I3; and making way in that of I4."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from sidecar.core import checksum, keys
from sidecar.core.commit import Decision, Mend, Object, Ready, Wait, attempt_of, commit_of, decide
from sidecar.core.local import Finished
from sidecar.core.manifest import Commit, FileEntry, Manifest, NodeOf, decode_commit, decode_manifest, encode
from sidecar.errors import AlreadyExists, NotFound, StoreError
from sidecar.store.protocol import Store
from sidecar.transfer import Transfers
from sidecar.upload.journal import Journal
from trainer_hook.contract import ContractError, Node, rfc3339

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Standing:
    """A commit found in the store. ``commit`` is ``None`` when it cannot be read: it protects nothing."""

    commit: Commit | None
    crc64nvme: str


def manifest_of(checkpoint: Finished, entries: Sequence[FileEntry]) -> Manifest:
    """Return the manifest of this node's part of a checkpoint."""
    return Manifest(
        name=checkpoint.name,
        step=checkpoint.step,
        attempt=checkpoint.attempt,
        node=NodeOf(index=checkpoint.node.index, count=checkpoint.node.count),
        reason=checkpoint.reason,
        created_at=rfc3339(checkpoint.created_at_s),
        world_size=checkpoint.world_size,
        meta=dict(checkpoint.meta),
        files=tuple(sorted(entries, key=lambda entry: entry.path)),
    )


class Committer:
    """Reads and writes the documents of a checkpoint in the store."""

    def __init__(self, store: Store, transfers: Transfers) -> None:
        self._store = store
        self._transfers = transfers
        self._published: tuple[bytes, Manifest] | None = None
        """The manifest that was written last: with thousands of files it is not read twice for nothing."""

    async def standing(self, name: str) -> Standing | None:
        """Return the commit of a checkpoint, or ``None`` if there is none."""
        key = keys.commit(name)
        try:
            raw = await self._transfers.persistently(self._store.get, key)
        except NotFound:
            return None
        try:
            commit = decode_commit(raw, key=key)
        except ContractError:
            commit = None
        return Standing(commit, checksum.to_text(checksum.checksum(raw)))

    async def own_manifest(self, checkpoint: Finished) -> Manifest | None:
        """Return the manifest that this node wrote for this attempt before, if it can be read."""
        key = keys.manifest(checkpoint.name, checkpoint.attempt, checkpoint.node)
        try:
            return decode_manifest(await self._transfers.persistently(self._store.get, key), key=key)
        except (NotFound, ContractError):
            return None

    async def part(self, commit: Commit, node: Node) -> Manifest | None:
        """Return the manifest of a node that a commit names, if it names one and it is what the commit says."""
        key = keys.manifest(commit.name, commit.attempt, node)
        named = next((entry for entry in commit.manifests if entry.key == key), None)
        if named is None:
            return None
        try:
            raw = await self._transfers.persistently(self._store.get, key)
            return decode_manifest(raw, key=key) if checksum.to_text(checksum.checksum(raw)) == named.crc64nvme else None
        except (NotFound, ContractError):
            return None

    async def damaged(self, commit: Commit) -> list[str]:
        """Return the keys whose objects are not those that a commit names."""
        listing = await self._transfers.persistently(self._listing, commit.name)
        found = []
        for named in commit.manifests:
            try:
                raw = await self._transfers.persistently(self._store.get, named.key)
                files = decode_manifest(raw, key=named.key).files
            except (NotFound, ContractError):
                found.append(named.key)
                continue
            for entry in files:
                there = listing.get(entry.key)
                if there is None or there.size_bytes != entry.size_bytes or (entry.etag and there.etag != entry.etag):
                    found.append(entry.key)
        return found

    async def is_untouched(self, name: str, *, attempt: str) -> bool:
        """Whether nothing in the store depends on the files of a step but what this attempt has written.

        Raises:
            StoreError: It cannot be known now.
        """
        there = await self._transfers.once(lambda: [o.key for o in self._store.list(keys.folder(name))])
        ours = keys.manifests(name, attempt)
        documents = [key for key in there if key.startswith(keys.manifests(name)) and not key.startswith(ours)]
        return keys.commit(name) not in there and not documents

    async def discard(self, sent: Journal) -> None:
        """Remove from the store what was sent of a checkpoint that will not be finished.

        Raises:
            StoreError: Not all of it could be removed.
        """
        for progress in sent.uploads.values():
            await self._transfers.once(self._store.abort_upload, progress.key, progress.upload_id)
        if sent.entries:
            await self._transfers.once(self._store.delete, [entry.key for entry in sent.entries.values()])

    async def make_way(self, name: str) -> None:
        """Take back what is committed, so that the step can be written anew: the commit, then the manifests it names (I4).

        Manifests that it does not name are somebody's work in progress: other nodes of our attempt publish theirs while
        we are still at it.
        """
        there = await self.standing(name)
        if there is None:
            return
        await self._transfers.persistently(self._store.delete, [keys.commit(name)])
        await self._transfers.persistently(self._store.delete, await self._named_by(name, there))

    async def _named_by(self, name: str, there: Standing) -> list[str]:
        if there.commit is not None:
            return [entry.key for entry in there.commit.manifests if attempt_of(entry.key, name) is not None]
        # Nothing says any more what it named; whoever still needs his manifest publishes it again.
        stored = await self._transfers.persistently(self._listing, name)
        return [key for key in stored if attempt_of(key, name) is not None]

    async def publish_manifest(self, manifest: Manifest) -> None:
        """Write this node's manifest: from now on its part counts as uploaded."""
        key = keys.manifest(manifest.name, manifest.attempt, Node(manifest.node.index, manifest.node.count))
        raw = encode(manifest)
        await self._transfers.persistently(self._store.put, key, raw)
        self._published = raw, manifest

    async def try_commit(self, checkpoint: Finished) -> Decision:
        """Commit if nothing is missing, and say what is otherwise."""
        (manifests, raw), listing = await asyncio.gather(
            self._manifests(checkpoint), self._transfers.persistently(self._listing, checkpoint.name)
        )
        decision = decide(manifests, listing, me=checkpoint.node)
        if not isinstance(decision, Ready):
            return decision
        commit = commit_of(manifests, raw, committed_at=rfc3339(time.time()))
        try:
            # Last on purpose: until this object exists the step is invisible (I1).
            await self._transfers.persistently(
                self._store.put, keys.commit(checkpoint.name), encode(commit), only_if_absent=True
            )
        except AlreadyExists:
            there = await self.standing(checkpoint.name)
            if there is None or there.commit is None or there.commit.manifests != commit.manifests:
                return Mend({}, "another attempt committed this step in the meantime")
        await self._sweep(checkpoint.name, manifests, listing)
        return decision

    async def _manifests(self, checkpoint: Finished) -> tuple[list[Manifest], dict[int, bytes]]:
        manifests, raw = [], {}
        for index in range(checkpoint.node.count):
            node = Node(index, checkpoint.node.count)
            key = keys.manifest(checkpoint.name, checkpoint.attempt, node)
            try:
                raw[index] = await self._transfers.persistently(self._store.get, key)
                known = self._published is not None and self._published[0] == raw[index]
                manifests.append(self._published[1] if known and self._published else decode_manifest(raw[index], key=key))
            except (NotFound, ContractError):
                continue
        return manifests, raw

    def _listing(self, name: str) -> dict[str, Object]:
        return {o.key: Object(o.size_bytes, o.etag) for o in self._store.list(keys.folder(name))}

    async def _sweep(self, name: str, manifests: Sequence[Manifest], listing: dict[str, Object]) -> None:
        # What an earlier version of the step left and nobody names.
        named = {entry.key for manifest in manifests for entry in manifest.files} | {keys.commit(name)}
        named |= {keys.manifest(name, m.attempt, Node(m.node.index, m.node.count)) for m in manifests}
        foreign = [key for key in listing if attempt_of(key, name) not in (None, manifests[0].attempt)]
        for key in foreign:
            named |= {key, *await self._files_named_by(key)}
        leftover = [key for key in listing if key not in named]
        if leftover:
            await self._transfers.persistently(self._store.delete, leftover)
        try:
            await self._transfers.once(self._abort_unfinished, name)
        except StoreError as error:  # they cost money, not data; the bucket's lifecycle rule removes them, too
            log.warning("unfinished_uploads_not_aborted", checkpoint=name, error=str(error))

    async def _files_named_by(self, key: str) -> set[str]:
        # The manifest of another attempt, which may be at work at this very moment.
        try:
            manifest = decode_manifest(await self._transfers.persistently(self._store.get, key), key=key)
        except (NotFound, ContractError):
            return set()
        return {entry.key for entry in manifest.files}

    def _abort_unfinished(self, name: str) -> None:
        # The step is committed: whatever is unfinished below it was begun anew since, such as one whose answer was lost.
        for pending in list(self._store.pending_uploads(keys.folder(name))):
            self._store.abort_upload(pending.key, pending.upload_id)


__all__ = ["Committer", "Mend", "Ready", "Standing", "Wait", "manifest_of"]
