"""Download of a committed checkpoint to the volume: all files are verified by their checksums, then published by a rename."""

from __future__ import annotations

import asyncio
import errno
import stat
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from sidecar.core.commit.damage import FULL_PATIENCE_S, SHORT_PATIENCE_S
from sidecar.core.format.manifest import FileEntry
from sidecar.core.format.obstacles import same_but_for_case, unstorable
from sidecar.download.incoming import PARTIAL, drop_others, give_space_back, require_space
from sidecar.download.offers import Offer, Offers
from sidecar.download.partial_file import holds
from sidecar.download.patience import Patience
from sidecar.download.range_fetcher import RangeFetcher
from sidecar.errors import CorruptObject, NotFound
from sidecar.store.protocol import Store
from sidecar.transfer.executor import StoreExecutor
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
    ListedFile,
    Marker,
    Node,
    encode_marker,
)

T = TypeVar("T")


class Downloader(Offers):
    """Reads also the data, last in the order of I5, and verifies each file against its manifest."""

    def __init__(self, store: Store, volume: Volume, executor: StoreExecutor, *, is_remote: bool = True) -> None:
        """Start with a reachable store. ``is_remote``: it is reached over a network, which may damage bytes."""
        super().__init__(store, executor)
        self._volume = volume
        self._full_patience_s = FULL_PATIENCE_S if is_remote else SHORT_PATIENCE_S

    def patience(self, *, is_short: bool) -> Patience:
        """Return the retry policy of damaged reads, for one step."""
        patience_s = SHORT_PATIENCE_S if is_short else self._full_patience_s
        return Patience(self._store, self._executor, patience_s=patience_s)

    async def is_local(self, offer: Offer, node: Node) -> bool:
        """Whether the volume already holds the node's files of an offer, with the recorded checksums."""
        place = self._volume / offer.name
        for entry in offer.files(node):
            if not await self._executor.in_thread(holds, place / entry.path, entry):
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
            MissingObject: An object was deleted.
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
        except OSError as error:
            if error.errno in FULL:
                await fetching.end()
                await asyncio.to_thread(give_space_back, self._volume, offer.name)
            raise
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
