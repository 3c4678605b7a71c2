"""Brings a committed checkpoint back to the volume: every byte compared with what its writer recorded, then one rename."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from sidecar.copies import gathered_in_commit
from sidecar.core import checksum, keys
from sidecar.core.gathering import EAGER_NODES
from sidecar.core.layout import Share, left_out
from sidecar.core.manifest import Commit, FileEntry, Manifest, ManifestEntry, decode_commit, decode_manifest
from sidecar.core.resume import check_listing, check_manifest, check_node_set, files_for
from sidecar.errors import CorruptObject, NotFound, Stopped
from sidecar.resume.fetching import Fetching
from sidecar.resume.partial import holds
from sidecar.store.protocol import Store
from sidecar.transfer import CORRUPT_TRIES, Transfers
from sidecar.volume.files import publish
from sidecar.volume.volume import Volume
from trainer_hook.contract import (
    MARKER,
    MAX_MARKER_BYTES,
    META_PARTIAL,
    META_RESTORED,
    ContractError,
    ListedFile,
    Marker,
    Node,
    encode_marker,
)

T = TypeVar("T")
PARTIAL = "partial"
"""Folder below ``.ckpt/incoming`` of files that are not whole yet."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A committed checkpoint whose documents were verified."""

    commit: Commit
    commit_crc: str
    manifests: tuple[Manifest, ...]
    share: Share | None = None
    """The ranks that it is for; ``None``: all of it is wanted."""

    def files(self, node: Node) -> list[FileEntry]:
        """Return what a node needs of it."""
        return files_for(node, self.manifests, self.share)

    def left_out(self, node: Node) -> int:
        """Return how many files the node does without."""
        return len(left_out(self.manifests, self.share, nodes=node.count))

    @property
    def name(self) -> str:
        """``checkpoint-<step>`` or ``final``."""
        return self.commit.name


class Downloader:
    """Reads in the order of I5: commit, manifests, data, each verified against what named it."""

    def __init__(self, store: Store, volume: Volume, transfers: Transfers) -> None:
        self._store = store
        self._volume = volume
        self._transfers = transfers

    async def committed(self) -> list[str]:
        """Return the names of all folders in the store; only some are checkpoints, and only some of those committed."""
        return await self._transfers.persistently(lambda: list(self._store.list_folders()))

    async def commit(self, name: str) -> tuple[Commit, str] | None:
        """Return a checkpoint's commit and its checksum, or ``None`` if it is not committed.

        Raises:
            ContractError: The commit cannot be read.
        """
        key = keys.commit(name)
        try:
            raw = await self._twice_the_same(key)
        except NotFound:
            return None
        return decode_commit(raw, key=key), checksum.to_text(checksum.checksum(raw))

    async def offer(self, commit: Commit, commit_crc: str, share: Share | None = None) -> Offer:
        """Verify all that can be verified without downloading data, also of what is not wanted.

        Raises:
            ContractError: A document or object is missing, or not what was recorded.
        """
        raw, sizes = await asyncio.gather(self._manifests(commit), self._transfers.persistently(self._sizes, commit.name))
        manifests = [decode_manifest(r, key=entry.key) for r, entry in zip(raw, commit.manifests, strict=True)]
        check_node_set(commit, manifests)
        check_listing(manifests, sizes)
        return Offer(commit, commit_crc, tuple(manifests), share)

    async def _manifests(self, commit: Commit) -> list[bytes]:
        """Return the commit's manifests, in its order; of a large job they lie together beside it."""
        gathered = {}
        if len(commit.manifests) > EAGER_NODES:
            gathered = await gathered_in_commit(commit, self._store, self._transfers)
        missing = [entry for entry in commit.manifests if entry.key not in gathered]
        read = await self._transfers.together(map(self._manifest, missing))
        found = gathered | {entry.key: raw for entry, raw in zip(missing, read, strict=True)}
        return [found[entry.key] for entry in commit.manifests]

    async def _twice_the_same(self, key: str) -> bytes:
        """Return a document that nothing else names, read until two answers in a row agree: the wire may have damaged one."""
        before, raw = await asyncio.gather(*[self._transfers.persistently(self._store.get, key) for _ in range(2)])
        for _ in range(CORRUPT_TRIES - 1):
            if raw == before:
                break
            before, raw = raw, await self._transfers.persistently(self._store.get, key)
        return raw

    def _sizes(self, name: str) -> dict[str, int]:
        return {found.key: found.size_bytes for found in self._store.list(keys.folder(name))}

    async def _manifest(self, entry: ManifestEntry) -> bytes:
        for tries_left in reversed(range(CORRUPT_TRIES)):
            try:
                raw = await self._transfers.persistently(self._store.get, entry.key)
                check_manifest(entry, raw)
                break
            except NotFound:
                raise ContractError(f"{entry.key}: missing in the store") from None
            except ContractError:
                if not tries_left:
                    raise
        return raw

    async def is_local(self, offer: Offer, node: Node) -> bool:
        """Whether the volume already holds what a node needs of an offer with the recorded checksums."""
        place = self._volume.root / offer.name
        for entry in offer.files(node):
            if not await self._transfers.once(holds, place / entry.path, entry):
                return False
        return True

    async def download(self, offer: Offer, node: Node, on_progress: Callable[[int, int], None]) -> Path:
        """Download an offer and publish it as a finished local checkpoint.

        Also when it is cancelled, it does not end before its threads have, or before what they write to is out of reach.

        Args:
            offer: What to download.
            node: Whose files are wanted where several nodes have one of the same path.
            on_progress: Called with the bytes that are there and the bytes of the whole.

        Returns:
            The directory on the volume.

        Raises:
            CorruptObject: A file's content is not what its writer recorded, also when fetched again.
            NotFound: An object disappeared.
            CheckpointChanged: The trainer wrote a checkpoint of this name meanwhile; its own stays.
            OSError: The volume is full or not writable; what was downloaded is kept for the next try.
        """
        incoming = self._volume.incoming / offer.name
        replacing = self._volume.fingerprint(offer.name)
        entries = offer.files(node)
        self._drop_others(incoming, entries)
        progress = _Progress(sum(entry.size_bytes for entry in entries), on_progress)
        fetching = Fetching(self._store, self._transfers, self._volume.incoming / PARTIAL, progress.add)
        try:
            await fetching.fetch(entries, incoming)
        except* (CorruptObject, NotFound, OSError, Stopped) as group:
            raise _first(group) from None
        finally:
            await fetching.end()
        return await _to_its_end(self._publish, offer, node, incoming, replacing)

    def _drop_others(self, incoming: Path, entries: Sequence[FileEntry]) -> None:
        wanted = {entry.path for entry in entries}
        for other in self._volume.incoming.iterdir():
            if other != incoming and other.name != PARTIAL:
                shutil.rmtree(other, ignore_errors=True)
        for path in [p for p in incoming.rglob("*") if not p.is_dir() or p.is_symlink()]:
            if path.relative_to(incoming).as_posix() not in wanted:
                path.unlink(missing_ok=True)

    def _publish(self, offer: Offer, node: Node, incoming: Path, replacing: tuple[int, float, str | None] | None) -> Path:
        shutil.rmtree(self._volume.incoming / PARTIAL, ignore_errors=True)
        incoming.mkdir(parents=True, exist_ok=True)
        publish(incoming / MARKER, _local_marker(offer, node), mode=0o664)
        for place in [incoming, *(p for p in incoming.rglob("*") if p.is_dir())]:
            place.chmod(0o2775)
        return self._volume.put_in_place(incoming, offer.name, replacing=replacing)


class _Progress:
    def __init__(self, total_bytes: int, tell: Callable[[int, int], None]) -> None:
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._tell = tell

    def add(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        self._tell(self._done_bytes, self._total_bytes)


def _local_marker(offer: Offer, node: Node) -> bytes:
    commit, meta = offer.commit, offer.commit.meta | {META_RESTORED: offer.commit_crc}
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
    # Every file was verified: a list that is too long for a marker can be left out.
    return encoded if len(encoded) <= MAX_MARKER_BYTES else encode_marker(replace(marker, files=None))


async def _to_its_end(call: Callable[..., T], *args: Any) -> T:
    """Run a call in a thread; being cancelled waits for it."""
    running = asyncio.ensure_future(asyncio.to_thread(call, *args))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group
