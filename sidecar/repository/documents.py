"""Reader of a checkpoint's documents in the store; compares them with the objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sidecar.core.commit.commit import ListingCheck, Object, attempt_of
from sidecar.core.commit.commit_roster import has_bundle
from sidecar.core.commit.damage import is_known_bad, is_record_in_force
from sidecar.core.format import checksum, keys
from sidecar.core.format.found_checkpoint import Finished
from sidecar.core.format.manifest import (
    Commit,
    FileEntry,
    Manifest,
    ManifestEntry,
    Quarantined,
    decode,
    decode_commit,
    decode_manifest,
)
from sidecar.errors import CorruptObject, LaterFormat, NotFound, OversizedDocument, UnusableNow
from sidecar.repository.manifest_bundle import bundled_manifests
from sidecar.store.protocol import Store
from sidecar.store.slice import BLOCK_BYTES
from sidecar.transfer.executor import StoreExecutor
from trainer_hook.contract import ContractError, LaterFormatError, Node, rfc3339


@dataclass(frozen=True, slots=True)
class StoredCommit:
    """A commit document in the store. ``commit`` is ``None`` if it is malformed: it protects nothing.

    ``crc64nvme`` is empty if the object is too large to be a commit.
    """

    commit: Commit | None
    crc64nvme: str
    problem: str = field(default="", compare=False)
    """Why it is malformed, with its key; empty: it is not."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a commit says of an object. ``etags``: ``None`` where a commit records none."""

    key: str
    size_bytes: int
    crc: int
    etags: tuple[str, ...] | None


class Documents:
    """Reads commits and manifests of checkpoints."""

    def __init__(self, store: Store, executor: StoreExecutor) -> None:
        self._store = store
        self._executor = executor

    async def stored_commit(self, name: str) -> StoredCommit | None:
        """Return the commit of a checkpoint, or ``None`` if there is none.

        Raises:
            LaterFormat: A later version wrote it.
        """
        key = keys.commit(name)
        try:
            raw = await self._executor.persistently(self._store.get, key)
        except NotFound:
            return None
        except OversizedDocument as error:
            return StoredCommit(None, "", str(error))
        try:
            return StoredCommit(decode_commit(raw, key=key), checksum.text_of(raw))
        except LaterFormatError as later:
            raise LaterFormat(later) from None
        except ContractError as error:
            return StoredCommit(None, checksum.text_of(raw), str(error))

    async def own_manifest(self, checkpoint: Finished) -> Manifest | None:
        """Return the manifest that this node wrote for this attempt before; ``None``: missing or malformed."""
        key = keys.manifest(checkpoint.name, checkpoint.attempt, checkpoint.node)
        try:
            return decode_manifest(await self._executor.persistently(self._store.get, key), key=key)
        except (NotFound, ContractError):
            return None

    async def part(self, commit: Commit, node: Node) -> Manifest | None:
        """Return a node's manifest of a commit; ``None``: the commit names none, or it does not match the commit."""
        named = named_in(commit, keys.manifest(commit.name, commit.attempt, node))
        return None if named is None else await self._manifest(named, None)

    async def damaged(self, commit: Commit, *, most_bytes: int | None = None) -> list[str]:
        """Return the keys whose objects differ from those in a commit.

        A read or a listing may be damaged in transit: an object that differs is checked twice more. ``most_bytes``: objects
        that have another etag alone are read up to this size together, smallest first; further ones count as whole. ``None``:
        all are read.
        """
        listing = await self._executor.persistently(self._listing, commit.name)
        unproven, wrong = await self._compare(commit, listing)
        named = {manifest.key: manifest for manifest in commit.manifests}
        suspects = [Recorded(entry.key, entry.size_bytes, entry.crc, (entry.etag,)) for entry in unproven]
        suspects += [Recorded(key, named[key].size_bytes, checksum.from_text(named[key].crc64nvme), None) for key in wrong]
        if not suspects:
            return []
        one, other = [await self._executor.persistently(self._listing, commit.name) for _ in range(2)]
        agreed = [suspect for suspect in suspects if one.get(suspect.key) == other.get(suspect.key)]
        if most_bytes is not None:
            agreed = _readable_within(most_bytes, agreed, one)
        return [suspect.key for suspect in agreed if await self._is_damaged(suspect, one.get(suspect.key))]

    async def _is_damaged(self, recorded: Recorded, there: Object | None) -> bool:
        came: list[str] = []
        while there is not None and there.size_bytes == recorded.size_bytes and len(came) < 2:
            crc = await self._crc(recorded)
            if crc == recorded.crc:
                return False
            came.append(str(crc))
        return is_known_bad(
            size_bytes=recorded.size_bytes,
            etags=recorded.etags if there is not None and there.etag else None,
            there=None if there is None else (there.size_bytes, there.etag),
            came=came,
        )

    async def why_not_whole(self, commit: Commit, crc64nvme: str) -> str | None:
        """Return why a commit is incomplete or damaged; ``None``: it is whole. Reads documents and one listing, no data."""
        listing = await self._executor.persistently(self._listing, commit.name)
        if await self.quarantine_reason(commit.name, crc64nvme, listing) is not None:
            return "it is bad"
        unproven, wrong = await self._compare(commit, listing)
        if wrong or unproven:
            return f"{(wrong or [unproven[0].key])[0]} is missing, or not what was recorded"
        return None

    async def quarantine_reason(self, name: str, crc64nvme: str, listing: Mapping[str, Object]) -> str | None:
        """Return why a record in a checkpoint's listing keeps this commit from a resume; ``None``: none does."""
        key = keys.quarantined(name, crc64nvme)
        if key not in listing:
            return None
        try:
            record = decode(Quarantined, await self._executor.persistently(self._store.get, key), key=key)
        except (NotFound, ContractError, UnusableNow):
            return "its record cannot be read"
        if not is_record_in_force(record.missing, listing):
            return None
        return f"{record.reason}{f' (found at {record.at})' if record.at else ''}"

    async def is_quarantined(self, name: str, crc64nvme: str) -> bool:
        """Whether any node has quarantined this commit of a checkpoint, and its record is in force."""
        key = keys.quarantined(name, crc64nvme)
        if not await self._executor.persistently(lambda: list(self._store.list(key))):
            return False
        listing = await self._executor.persistently(self._listing, name)
        return await self.quarantine_reason(name, crc64nvme, listing) is not None

    async def _compare(self, commit: Commit, listing: Mapping[str, Object]) -> tuple[list[FileEntry], list[str]]:
        """Return the files that the listing does not prove, and the keys of manifests that do not match the commit."""
        check, wrong = ListingCheck(listing), []
        gathered = await bundled_manifests(commit, self._store, self._executor)
        for named in commit.manifests:
            manifest = await self._manifest(named, gathered.pop(named.key, None))
            if manifest is None:
                wrong.append(named.key)
            else:
                check.add(manifest)
        return check.unproven(), wrong

    async def _manifest(self, named: ManifestEntry, raw: bytes | None) -> Manifest | None:
        """Return a manifest if it matches the commit, else ``None``. ``raw``: its bytes in the bundle; ``None``: not in it."""
        try:
            if raw is None or not _matches(named, raw):
                raw = await self._executor.persistently(self._read_named, named)
            return decode_manifest(raw, key=named.key)
        except (NotFound, OversizedDocument, CorruptObject, ContractError):
            return None

    def _read_named(self, named: ManifestEntry) -> bytes:
        raw = self._store.get(named.key, most_bytes=named.size_bytes)
        if not _matches(named, raw):
            got = f"crc64nvme {checksum.text_of(raw)}"
            raise CorruptObject(named.key, want=f"crc64nvme {named.crc64nvme}", got=got)
        return raw

    async def _crc(self, recorded: Recorded) -> int | None:
        """Return the checksum of an object's content by reading it; ``None``: it is gone, or has another size."""
        try:
            return await self._executor.persistently(self._crc_of_range, recorded.key, 0, recorded.size_bytes)
        except (NotFound, CorruptObject):
            return None

    def _crc_of_range(self, key: str, offset: int, length: int) -> int:
        crc, buffer = 0, memoryview(bytearray(min(BLOCK_BYTES, max(1, length))))
        with self._store.read(key, offset=offset, length=length) as body:
            while count := body.readinto(buffer):
                self._executor.gate.check()
                crc = checksum.checksum(buffer[:count], crc)
        return crc

    async def is_committed(self, checkpoint: Finished) -> bool:
        """Whether a checkpoint's step has a whole commit that names this node's part of the same save: others may write it.

        Reads documents and one listing, no data: an object that only its content could prove counts as damaged.

        Raises:
            StoreError: A request failed.
        """
        stored = await self.stored_commit(checkpoint.name)
        if stored is None or stored.commit is None or stored.commit.attempt != checkpoint.attempt:
            return False
        part = await self.part(stored.commit, checkpoint.node)
        if part is None or not is_of(part, checkpoint):
            return False
        return await self.why_not_whole(stored.commit, stored.crc64nvme) is None

    async def _named_by(self, name: str, stored: StoredCommit) -> list[str]:
        if stored.commit is not None:
            bundle = keys.all_manifests(name, stored.commit.attempt)
            named = [e.key for e in stored.commit.manifests if attempt_of(e.key, name) is not None]
            return [*named, bundle] if has_bundle(len(stored.commit.manifests)) else named
        # Its manifests are unknown; a node that still needs its manifest publishes it again.
        listing = await self._executor.persistently(self._listing, name)
        return [key for key in listing if attempt_of(key, name) is not None]

    def _listing(self, name: str) -> dict[str, Object]:
        return {o.key: Object(o.size_bytes, o.etag) for o in self._store.list(keys.folder(name))}


def named_in(commit: Commit, key: str) -> ManifestEntry | None:
    """Return a commit's entry for the manifest under a key; ``None``: it has none."""
    return next((entry for entry in commit.manifests if entry.key == key), None)


def _readable_within(most_bytes: int, suspects: Iterable[Recorded], there: Mapping[str, Object]) -> list[Recorded]:
    """Return the suspects that need no read, as they are missing or have another size, and of the others what may be read."""
    found, left_bytes = [], most_bytes
    for suspect in sorted(suspects, key=lambda each: each.size_bytes):
        has_its_size = (now := there.get(suspect.key)) is not None and now.size_bytes == suspect.size_bytes
        left_bytes -= suspect.size_bytes if has_its_size else 0
        if not has_its_size or left_bytes >= 0:
            found.append(suspect)
    return found


def _matches(named: ManifestEntry, raw: bytes) -> bool:
    """Whether bytes are those of the manifest that a commit names."""
    return checksum.text_of(raw) == named.crc64nvme


def is_of(manifest: Manifest, checkpoint: Finished) -> bool:
    """Whether a manifest belongs to this save of a checkpoint."""
    return (manifest.save_id, manifest.created_at) == (checkpoint.save_id, rfc3339(checkpoint.created_at_s))
