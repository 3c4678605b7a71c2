"""Committed checkpoints of the store, offered to a resume once all of their documents were verified."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from sidecar.core.commit.damage import is_content_of
from sidecar.core.commit.resume import (
    MissingObject,
    check_listing,
    check_manifest,
    check_node_set,
    check_paths,
    files_for,
    unlike_listing,
)
from sidecar.core.format import checksum, keys
from sidecar.core.format.manifest import Commit, FileEntry, Manifest, ManifestEntry, decode_all, decode_commit
from sidecar.core.format.rank_layout import Share, left_out
from sidecar.download.quarantine import has_obsolete_record
from sidecar.errors import LaterFormat, NotFound, OversizedDocument
from sidecar.repository.manifest_bundle import bundled_manifests
from sidecar.store.protocol import Store, Stored
from sidecar.transfer.executor import CORRUPT_TRIES, StoreExecutor
from trainer_hook.contract import ContractError, LaterFormatError, Node, is_checkpoint_name

MOST_OBJECTS = 500_000
"""Maximum number of objects below a checkpoint that is resumed: more than its files and documents."""
LISTING_PAGE = 1000
"""Number of keys in one page of an S3 listing."""


class Unproven(ContractError):
    """The documents received are inconsistent; they may have been damaged in transit."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A committed checkpoint whose documents were verified."""

    commit: Commit
    commit_crc: str
    manifests: tuple[Manifest, ...]
    share: Share | None = None
    """The ranks that it is for; ``None``: all files are wanted."""
    has_quarantine_record: bool = False
    """An obsolete record in the store names it: what was missing is there."""

    def files(self, node: Node) -> list[FileEntry]:
        """Return the files that a node downloads."""
        return files_for(node, self.manifests, self.share)

    def left_out(self, node: Node) -> int:
        """Return the number of files that the node does not download."""
        return len(left_out(self.manifests, self.share, nodes=node.count))

    @property
    def name(self) -> str:
        """``checkpoint-<step>`` or ``final``."""
        return self.commit.name

    def etags(self, key: str) -> set[str]:
        """Return the etags that manifests recorded for an object; several if its owner uploaded it again."""
        return {entry.etag for manifest in self.manifests for entry in manifest.files if entry.key == key}


class Offers:
    """Reads in the order of I5: the commit, then its manifests. Each is verified against the document that names it."""

    def __init__(self, store: Store, executor: StoreExecutor) -> None:
        self._store = store
        self._executor = executor

    async def some_names(self) -> list[str]:
        """Return some names of ``list_folders`` from another request, so that one damaged answer cannot hide a name."""
        keys_of_steps = await self._executor.persistently(lambda: list(islice(self._store.list(keys.STEPS), LISTING_PAGE)))
        return [stored.key.partition("/")[0] for stored in keys_of_steps if "/" in stored.key]

    async def list_folders(self) -> list[str]:
        """Return the names of all checkpoints in the store, also of uncommitted ones. Other folders take time, no memory."""
        return await self._executor.persistently(lambda: list(filter(is_checkpoint_name, self._store.list_folders())))

    async def commit(self, name: str) -> tuple[Commit, str] | None:
        """Return a checkpoint's commit and its checksum, or ``None`` if it is not committed.

        Raises:
            UnusableNow: The commit is in an archive tier, or of a later format.
            Unproven: The commit is malformed; it may have been damaged in transit.
            ContractError: The store provably holds a malformed commit.
        """
        key = keys.commit(name)
        try:
            raw = await self._twice_the_same(key)
        except NotFound:
            return None
        try:
            return decode_commit(raw, key=key), checksum.text_of(raw)
        except LaterFormatError as later:
            raise LaterFormat(later) from None
        except ContractError as error:
            if await self._holds(key, raw):
                raise
            raise Unproven(str(error)) from None

    async def offer(self, commit: Commit, commit_crc: str, share: Share | None = None) -> Offer:
        """Verify everything that needs no download of data, also files that this node does not want.

        Raises:
            KnownBad: The commit is quarantined by another node, or by an earlier process of this one.
            UnusableNow: A document is in an archive tier, or of a later format.
            Unproven: A document or the listing received differs from the recorded one.
            ContractError: A document or object is missing, or provably differs from the recorded one in the store.
        """
        try:
            raw, sizes = await asyncio.gather(self._manifests(commit), self._executor.persistently(self._sizes, commit.name))
        except OversizedDocument as error:
            if await self._holds_commit(commit, commit_crc):
                raise
            raise Unproven(str(error)) from None
        if len(sizes) > MOST_OBJECTS:
            raise Unproven(
                f"{commit.name}: the store lists more than {MOST_OBJECTS} objects below it: delete what is not its own"
            )
        has_record = await has_obsolete_record(commit.name, commit_crc, sizes, self._store, self._executor)
        try:
            for entry, read in zip(commit.manifests, raw, strict=True):
                if read is None:
                    raise MissingObject(entry.key)
                check_manifest(entry, read)
            manifests = decode_all((entry.key, r or b"") for r, entry in zip(raw, commit.manifests, strict=True))
            check_node_set(commit, manifests)
            check_paths(commit, (entry for manifest in manifests for entry in manifest.files))
        except LaterFormatError as later:
            raise LaterFormat(later) from None
        except ContractError as error:
            if await self._hold(commit, commit_crc, raw):
                raise
            raise Unproven(str(error)) from None
        await self._check_listing(manifests, sizes)
        return Offer(commit, commit_crc, tuple(manifests), share, has_record)

    async def _check_listing(self, manifests: Sequence[Manifest], sizes: Mapping[str, int]) -> None:
        try:
            check_listing(manifests, sizes)
        except ContractError as error:
            entry = next(iter(unlike_listing(manifests, sizes)))
            there = await self._stored(entry.key)
            if (there.size_bytes if there else None) != sizes.get(entry.key):  # neither answer has a checksum
                raise Unproven(f"{error} by the listing, but not by a request for the object alone") from None
            raise

    async def _hold(self, commit: Commit, commit_crc: str, raw: Sequence[bytes | None]) -> bool:
        """Whether the store provably holds the commit as it was read, and each manifest that does not match the commit."""
        if not await self._holds_commit(commit, commit_crc):
            return False
        for entry, read in zip(commit.manifests, raw, strict=True):
            if read is None:
                if await self._stored(entry.key) is not None:
                    return False
            elif not _fits(entry, read) and not await self._holds(entry.key, read):
                return False
        return True

    async def _holds_commit(self, commit: Commit, commit_crc: str) -> bool:
        """Whether the store provably holds the commit as it was read."""
        key = keys.commit(commit.name)
        try:
            again = await self._executor.persistently(self._store.get, key)
        except NotFound:
            return False
        return checksum.text_of(again) == commit_crc and await self._holds(key, again)

    async def _holds(self, key: str, raw: bytes) -> bool:
        """Whether the store provably holds these bytes under a key."""
        there = await self._stored(key)
        return there is not None and is_content_of(raw, size_bytes=there.size_bytes, etag=there.etag)

    async def _stored(self, key: str) -> Stored | None:
        try:
            return await self._executor.persistently(self._store.stat, key)
        except NotFound:
            return None

    async def _manifests(self, commit: Commit) -> list[bytes | None]:
        """Return the bytes of the commit's manifests in its order, ``None`` for a missing one.

        For a large job they are read from one bundle.
        """
        gathered = await bundled_manifests(commit, self._store, self._executor)
        missing = [entry for entry in commit.manifests if entry.key not in gathered]
        read = await self._executor.together(map(self._manifest, missing))
        found: dict[str, bytes | None] = {**gathered, **{entry.key: raw for entry, raw in zip(missing, read, strict=True)}}
        return [found[entry.key] for entry in commit.manifests]

    async def _twice_the_same(self, key: str) -> bytes:
        """Return a document without a recorded checksum, read until two answers in a row agree."""
        before, raw = await asyncio.gather(*[self._executor.persistently(self._store.get, key) for _ in range(2)])
        for _ in range(CORRUPT_TRIES - 1):
            if raw == before:
                break
            before, raw = raw, await self._executor.persistently(self._store.get, key)
        return raw

    def _sizes(self, name: str) -> dict[str, int]:
        listed = islice(self._store.list(keys.folder(name)), MOST_OBJECTS + 1)
        return {found.key: found.size_bytes for found in listed}

    async def _manifest(self, entry: ManifestEntry) -> bytes | None:
        raw = b""
        for _ in range(CORRUPT_TRIES):
            try:
                raw = await self._executor.persistently(lambda: self._store.get(entry.key, most_bytes=entry.size_bytes))
            except NotFound:
                return None
            if _fits(entry, raw):
                break
        return raw


def _fits(entry: ManifestEntry, raw: bytes) -> bool:
    try:
        check_manifest(entry, raw)
    except ContractError:
        return False
    return True
