"""Reads the documents of a checkpoint in the store, and compares them with the objects."""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.copies import gathered_in_commit
from sidecar.core import checksum, keys
from sidecar.core.commit import Object, attempt_of
from sidecar.core.gathering import EAGER_NODES
from sidecar.core.local import Finished
from sidecar.core.manifest import Commit, FileEntry, Manifest, ManifestEntry, decode_commit, decode_manifest
from sidecar.errors import CorruptObject, NotFound
from sidecar.store.protocol import Store
from sidecar.store.slice import BLOCK_BYTES
from sidecar.transfer import Transfers
from trainer_hook.contract import ContractError, Node


@dataclass(frozen=True, slots=True)
class Standing:
    """A commit found in the store. ``commit`` is ``None`` when it cannot be read: it protects nothing."""

    commit: Commit | None
    crc64nvme: str


class Documents:
    """The commit and the manifests of checkpoints, as they are in the store."""

    def __init__(self, store: Store, transfers: Transfers) -> None:
        self._store = store
        self._transfers = transfers

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
        named = named_in(commit, key)
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
        manifests, found = await self._manifests_of(commit)
        etags: dict[str, set[str]] = {}
        for entry in (entry for manifest in manifests for entry in manifest.files):
            etags.setdefault(entry.key, set()).add(entry.etag)
        for entry in {entry.key: entry for manifest in manifests for entry in manifest.files}.values():
            there = listing.get(entry.key)
            # Of nodes with the same content any may have been the last to send it; an empty etag is a store's that has none.
            known = there is not None and bool({there.etag, ""} & etags[entry.key])
            if there is None or there.size_bytes != entry.size_bytes or not (known or await self._holds(entry)):
                found.append(entry.key)
        return found

    async def _holds(self, entry: FileEntry) -> bool:
        """Whether an object that was written again has the same content: not every store's etag tells."""
        try:
            return await self._transfers.persistently(self._crc_of, entry.key, entry.size_bytes) == entry.crc
        except (NotFound, CorruptObject):
            return False

    def _crc_of(self, key: str, size_bytes: int) -> int:
        crc, buffer = 0, memoryview(bytearray(min(BLOCK_BYTES, max(1, size_bytes))))
        with self._store.read(key, length=size_bytes) as body:
            while count := body.readinto(buffer):
                self._transfers.gate.check()
                crc = checksum.checksum(buffer[:count], crc)
        return crc

    async def _manifests_of(self, commit: Commit) -> tuple[list[Manifest], list[str]]:
        """Return the manifests that a commit names, and the keys of those that are not what it says."""
        many = len(commit.manifests) > EAGER_NODES
        gathered = await gathered_in_commit(commit, self._store, self._transfers) if many else {}
        manifests, wrong = [], []
        for named in commit.manifests:
            try:
                raw = gathered.get(named.key)
                if raw is None:
                    raw = await self._transfers.persistently(self._store.get, named.key)
                if checksum.to_text(checksum.checksum(raw)) == named.crc64nvme:
                    manifests.append(decode_manifest(raw, key=named.key))
                    continue
            except (NotFound, ContractError):
                pass
            wrong.append(named.key)
        return manifests, wrong

    async def _named_by(self, name: str, there: Standing) -> list[str]:
        if there.commit is not None:
            copy = keys.all_manifests(name, there.commit.attempt)
            many = len(there.commit.manifests) > EAGER_NODES
            return [e.key for e in there.commit.manifests if attempt_of(e.key, name) is not None] + [copy] * many
        # Nothing says any more what it named; whoever still needs his manifest publishes it again.
        stored = await self._transfers.persistently(self._listing, name)
        return [key for key in stored if attempt_of(key, name) is not None]

    def _listing(self, name: str) -> dict[str, Object]:
        return {o.key: Object(o.size_bytes, o.etag) for o in self._store.list(keys.folder(name))}


def named_in(commit: Commit, key: str) -> ManifestEntry | None:
    """Return what a commit says of the manifest under a key, if it names it."""
    return next((entry for entry in commit.manifests if entry.key == key), None)
