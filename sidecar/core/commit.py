"""When a step may be committed, and what a node has to mend first (FORMAT.md, I2, I3, I6).

There is no coordinator. Every node looks at the same two things, the manifests of its attempt and the listing of the
checkpoint's objects, and decides for itself; whoever finds nothing missing writes the commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sidecar.core import checksum, keys
from sidecar.core.manifest import Commit, FileEntry, Manifest, ManifestEntry
from trainer_hook.contract import Node, step_of


@dataclass(frozen=True, slots=True)
class Object:
    """An object as the listing of the store shows it."""

    size_bytes: int
    etag: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Nothing is missing."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Other nodes have something to do first."""

    reason: str


@dataclass(frozen=True, slots=True)
class Mend:
    """This node has to send files again, each under the key given, and write its manifest anew."""

    files: Mapping[str, str]
    """Path to key."""
    reason: str


Decision = Ready | Wait | Mend


def decide(manifests: Sequence[Manifest], listing: Mapping[str, Object], *, me: Node) -> Decision:
    """Return what this node does about the commit of a checkpoint.

    Args:
        manifests: All manifests of this attempt for a job of ``me.count`` nodes, in any order, this node's included.
        listing: Every object below the checkpoint's folder, by key.
        me: This node.

    Two nodes that use one key for different content: the lowest index keeps the key, the others move theirs below their
    own folder. An object that is not what its manifest says was overwritten on the way and is sent again by its owner.
    """
    by_index = {m.node.index: m for m in manifests}
    owners = _owners(manifests)
    mine = by_index.get(me.index)
    if mine is None:
        return Wait("this node's own manifest is not in the store")
    moved = {
        entry.path: keys.node_file(mine.name, mine.attempt, me, entry.path)
        for entry in mine.files
        if (owner := owners[entry.key]) != (me.index, entry.crc64nvme) and owner[1] != entry.crc64nvme
    }
    if moved:
        return Mend(moved, "another node uses the same path for other content")
    broken = {entry.path: entry.key for entry in mine.files if not _is_there(entry, listing, owners, me.index)}
    if broken:
        return Mend(broken, "the store no longer has what was sent")
    missing = [str(index) for index in range(me.count) if index not in by_index]
    if missing:
        return Wait(f"waiting for node {', '.join(missing[:8])}{' …' if len(missing) > 8 else ''} of {me.count}")
    for manifest in manifests:
        for entry in manifest.files:
            if owners[entry.key][1] != entry.crc64nvme or not _is_there(entry, listing, owners, manifest.node.index):
                return Wait(f"node {manifest.node.index} has to send {entry.path} again")
    return Ready()


def _owners(manifests: Iterable[Manifest]) -> dict[str, tuple[int, str]]:
    owners: dict[str, tuple[int, str]] = {}
    for manifest in sorted(manifests, key=lambda m: m.node.index):
        for entry in manifest.files:
            owners.setdefault(entry.key, (manifest.node.index, entry.crc64nvme))
    return owners


def _is_there(entry: FileEntry, listing: Mapping[str, Object], owners: Mapping[str, tuple[int, str]], index: int) -> bool:
    there = listing.get(entry.key)
    if there is None or there.size_bytes != entry.size_bytes:
        return False
    # Of several nodes that sent equal content under one key, the lowest answers for the object that is there now.
    return owners[entry.key][0] != index or not entry.etag or there.etag == entry.etag


def commit_of(manifests: Sequence[Manifest], raw: Mapping[int, bytes], *, committed_at: str) -> Commit:
    """Return the commit that names the manifests of all nodes; ``raw`` has their bytes as stored, by node index."""
    ordered = sorted(manifests, key=lambda m: m.node.index)
    first = ordered[0]
    distinct = {entry.key: entry.size_bytes for manifest in ordered for entry in manifest.files}
    return Commit(
        name=first.name,
        step=step_of(first.name) if step_of(first.name) is not None else first.step,
        attempt=first.attempt,
        reason=first.reason,
        created_at=first.created_at,
        committed_at=committed_at,
        world_size=first.world_size,
        meta=first.meta,
        files=len(distinct),
        size_bytes=sum(distinct.values()),
        manifests=tuple(
            ManifestEntry(
                key=keys.manifest(m.name, m.attempt, Node(m.node.index, m.node.count)),
                size_bytes=len(raw[m.node.index]),
                crc64nvme=checksum.to_text(checksum.checksum(raw[m.node.index])),
            )
            for m in ordered
        ),
    )


def is_stale(*, ours: str, our_created_at: str | None, theirs: str, their_created_at: str | None) -> bool:
    """Whether our attempt is the older of two that wrote the same step: a zombie must not replace what came later."""
    return ours != theirs and our_created_at is not None and their_created_at is not None and our_created_at < their_created_at
