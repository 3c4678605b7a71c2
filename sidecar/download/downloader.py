"""Download of a committed checkpoint to the volume: all files are verified by their checksums, then published by a rename."""

from __future__ import annotations

import asyncio
import errno
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from sidecar.core.commit.damage import FULL_PATIENCE_S, SHORT_PATIENCE_S, is_content_of
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
from sidecar.core.format.obstacles import same_but_for_case, unstorable
from sidecar.core.format.rank_layout import Share, left_out
from sidecar.download.incoming import PARTIAL, drop_others, give_space_back, require_space
from sidecar.download.partial_file import holds
from sidecar.download.patience import Patience
from sidecar.download.quarantine import has_obsolete_record
from sidecar.download.range_fetcher import RangeFetcher
from sidecar.errors import CorruptObject, LaterFormat, NotFound, OversizedDocument, Stopped, StoreError
from sidecar.repository.manifest_bundle import bundled_manifests
from sidecar.store.protocol import Store, Stored
from sidecar.tasks import first_error
from sidecar.transfer.executor import CORRUPT_TRIES, StoreExecutor
from sidecar.volume.boot import boot_id
from sidecar.volume.files import FULL
from sidecar.volume.opener import Place
from sidecar.volume.volume import Volume
from trainer_hook.contract import (
    MARKER,
    MAX_MARKER_BYTES,
    META_PARTIAL,
    META_RESTORED,
    META_RESTORED_BOOT,
    ContractError,
    LaterFormatError,
    ListedFile,
    Marker,
    Node,
    encode_marker,
    is_checkpoint_name,
)

T = TypeVar("T")
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


class Downloader:
    """Reads in the order of I5: commit, manifests, data. Each is verified against the document that names it."""

    def __init__(self, store: Store, volume: Volume, executor: StoreExecutor, *, is_remote: bool = True) -> None:
        """Start with a reachable store. ``is_remote``: it is reached over a network, which may damage bytes."""
        self._store = store
        self._volume = volume
        self._executor = executor
        self._full_patience_s = FULL_PATIENCE_S if is_remote else SHORT_PATIENCE_S

    def patience(self, *, is_short: bool) -> Patience:
        """Return the retry policy of damaged reads, for one step."""
        patience_s = SHORT_PATIENCE_S if is_short else self._full_patience_s
        return Patience(self._store, self._executor, patience_s=patience_s)

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

    async def is_local(self, offer: Offer, node: Node) -> bool:
        """Whether the volume already holds the node's files of an offer, with the recorded checksums."""
        place = self._volume / offer.name
        for entry in offer.files(node):
            if not await self._executor.once(holds, place / entry.path, entry):
                return False
        return True

    async def download(self, offer: Offer, node: Node, on_progress: Callable[[int, int], None], *, patience: Patience) -> Path:
        """Download an offer and publish it as a finished local checkpoint.

        A cancelled call waits until its threads have ended, or until the folder that they write to has been renamed.

        Args:
            offer: What to download.
            node: If several nodes have one path, this node's file is chosen.
            on_progress: Called with the bytes received and the total bytes.
            patience: Retry policy of damaged reads.

        Returns:
            The directory on the volume.

        Raises:
            CorruptObject: A file differs from its recorded checksum, by the store's own metadata.
            NotFound: An object was deleted.
            ArchivedObject: An object is in an archive tier.
            UnreadableObject: A file arrives damaged repeatedly, although the store's metadata are right.
            CheckpointChanged: The trainer wrote a checkpoint of this name meanwhile; it stays.
            OSError: The volume is not writable, or cannot hold these names; the bytes downloaded are kept. ``ENOSPC``: it is
                full; they are deleted, because the trainer needs the space.
        """
        incoming = self._volume.incoming / offer.name
        replacing = self._volume.fingerprint(offer.name)
        entries = offer.files(node)
        if why := unstorable(entry.path for entry in entries):
            raise OSError(errno.ENAMETOOLONG, why)
        drop_others(self._volume, offer.name, entries)
        require_space(self._volume, offer.name, entries)
        progress = _DownloadProgress(sum(entry.size_bytes for entry in entries), on_progress)

        async def on_damage(entry: FileEntry, error: CorruptObject | NotFound) -> None:
            await patience.damaged(entry.key, error, size_bytes=entry.size_bytes, etags=offer.etags(entry.key))

        fetching = RangeFetcher(self._store, self._executor, self._volume.incoming / PARTIAL, progress.add, on_damage)
        try:
            await fetching.fetch(entries, incoming)
        except* (StoreError, OSError, Stopped) as group:
            error = first_error(group)
            if isinstance(error, OSError) and error.errno in FULL:
                await fetching.end()
                await asyncio.to_thread(give_space_back, self._volume, offer.name)
            raise error from None
        finally:
            await fetching.end()
        await asyncio.to_thread(_check_apart, incoming, entries)
        return await _to_its_end(self._publish, offer, node, incoming, replacing)

    def _publish(self, offer: Offer, node: Node, incoming: Place, replacing: tuple[int, float, str | None] | None) -> Path:
        (self._volume.incoming / PARTIAL).discard()
        incoming.make_folder()
        (incoming / MARKER).publish(_local_marker(offer, node), mode=0o664)
        incoming.change_mode(0o2775)
        for path, status in [*incoming.walk()]:
            if stat.S_ISDIR(status.st_mode):
                (incoming / path).change_mode(0o2775)
        return self._volume.put_in_place(incoming, offer.name, replacing=replacing)


class _DownloadProgress:
    def __init__(self, total_bytes: int, tell: Callable[[int, int], None]) -> None:
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._tell = tell

    def add(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        self._tell(self._done_bytes, self._total_bytes)


def _fits(entry: ManifestEntry, raw: bytes) -> bool:
    try:
        check_manifest(entry, raw)
    except ContractError:
        return False
    return True


def _check_apart(folder: Place, entries: Sequence[FileEntry]) -> None:
    """Check that no two files collided on a case-insensitive volume.

    Raises:
        OSError: Two did.
    """
    alike = same_but_for_case(entry.path for entry in entries)
    if len({(folder / path).status().st_ino for path in alike}) != len(alike):
        raise OSError(errno.EEXIST, f"the volume ignores case and takes {alike[0]} and {alike[1]} for one file")


def _local_marker(offer: Offer, node: Node) -> bytes:
    commit = offer.commit
    meta = commit.meta | {META_RESTORED: offer.commit_crc, META_RESTORED_BOOT: boot_id()}
    if missing := offer.left_out(node):
        meta[META_PARTIAL] = missing
    marker = Marker(
        step=commit.step,
        reason=commit.reason,
        created_at=commit.created_at,
        attempt=commit.attempt,
        world_size=commit.world_size,
        files=tuple(ListedFile(entry.path, entry.size_bytes) for entry in offer.files(node)),
        meta=meta,
    )
    encoded = encode_marker(marker)
    # Every file was verified, so a list that is too long for a marker can be left out.
    return encoded if len(encoded) <= MAX_MARKER_BYTES else encode_marker(replace(marker, files=None))


async def _to_its_end(call: Callable[..., T], *args: Any) -> T:
    """Run a call in a thread; a cancelled caller waits for its end."""
    running = asyncio.ensure_future(asyncio.to_thread(call, *args))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise
