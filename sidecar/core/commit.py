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
    """Path to key. Empty: the manifest alone is missing."""
    reason: str


@dataclass(frozen=True, slots=True)
class Yield:
    """A later attempt writes the step now: going on would only spoil its files again and again."""

    reason: str


Decision = Ready | Wait | Mend | Yield
MOVED = "another node uses the same path for other content"
GONE = "the store no longer has what was sent"


def decide(manifests: Sequence[Manifest], listing: Mapping[str, Object], *, me: Node) -> Decision:
    """Return what this node does about the commit of a checkpoint.

    Args:
        manifests: All manifests of this attempt for a job of ``me.count`` nodes, in any order, this node's included.
        listing: Every object below the checkpoint's folder, by key.
        me: This node.

    Only manifests of the same writing of the step count: a node whose part is of another one is as good as missing.

    Of several nodes that use one key the lowest index owns it: those with other content move theirs below their own
    folder, and the owner alone sends again what was overwritten or is gone, once everybody has uploaded. So nothing
    is sent twice in turns, and no manifest changes once a commit names it.
    """
    mine = next((m for m in manifests if m.node.index == me.index), None)
    if mine is None:
        # Whoever took back an earlier version of the step took it along: the files are there, so it costs one request.
        return Mend({}, "this node's own manifest is not in the store any more")
    manifests = [m for m in manifests if m.save_id == mine.save_id]
    by_index = {m.node.index: m for m in manifests}
    claims = _claims(manifests)
    if moved := _moved(mine, claims):
        return Mend(moved, MOVED)
    missing = [index for index in range(me.count) if index not in by_index]
    if missing:
        return waiting_for(missing, count=me.count)
    if owned := _owned_and_broken(mine, listing, claims):
        return Mend(owned, GONE)
    for manifest in manifests:
        for entry in manifest.files:
            claim = claims[entry.key]
            if claim.crc64nvme != entry.crc64nvme or not _is_there(entry, listing, claims):
                owner = claim.owner if claim.crc64nvme == entry.crc64nvme else manifest.node.index
                return Wait(f"node {owner} has to send {entry.path} again")
    return Ready()


def to_mend(manifests: Sequence[Manifest], listing: Mapping[str, Object]) -> dict[int, Mapping[str, str]]:
    """Return what each node of a job has to send again, as ``decide`` would tell it, once all manifests are there."""
    claims = _claims(manifests)
    found = {m.node.index: _moved(m, claims) or _owned_and_broken(m, listing, claims) for m in manifests}
    return {index: files for index, files in found.items() if files}


def waiting_for(missing: Sequence[int], *, count: int) -> Wait:
    """Return that the manifests of these nodes are not there yet."""
    named = ", ".join(map(str, missing[:8]))
    return Wait(f"waiting for node {named}{' …' if len(missing) > 8 else ''} of {count}")


@dataclass(frozen=True, slots=True)
class _Claim:
    """What lies under a key if all goes well: the content of the lowest node that uses it, whoever sent it last."""

    owner: int
    crc64nvme: str
    etags: set[str]


def _claims(manifests: Iterable[Manifest]) -> dict[str, _Claim]:
    claims: dict[str, _Claim] = {}
    for manifest in sorted(manifests, key=lambda m: m.node.index):
        for entry in manifest.files:
            claim = claims.setdefault(entry.key, _Claim(manifest.node.index, entry.crc64nvme, set()))
            if claim.crc64nvme == entry.crc64nvme:
                claim.etags.add(entry.etag)
    return claims


def _moved(mine: Manifest, claims: Mapping[str, _Claim]) -> Mapping[str, str]:
    node = Node(mine.node.index, mine.node.count)
    return {
        entry.path: keys.node_file(mine.name, mine.attempt, node, entry.path)
        for entry in mine.files
        if claims[entry.key].crc64nvme != entry.crc64nvme
    }


def _owned_and_broken(mine: Manifest, listing: Mapping[str, Object], claims: Mapping[str, _Claim]) -> Mapping[str, str]:
    return {
        entry.path: entry.key
        for entry in mine.files
        if claims[entry.key].owner == mine.node.index and not _is_there(entry, listing, claims)
    }


def _is_there(entry: FileEntry, listing: Mapping[str, Object], claims: Mapping[str, _Claim]) -> bool:
    there = listing.get(entry.key)
    if there is None or there.size_bytes != entry.size_bytes:
        return False
    # Any node that sent this content may have been the last; an empty etag is a store's that has none.
    etags = claims[entry.key].etags
    return there.etag in etags or etags == {""}


def commit_of(manifests: Sequence[Manifest], raw: Mapping[int, bytes], *, committed_at: str) -> Commit:
    """Return the commit that names the manifests of all nodes; ``raw`` has their bytes as stored, by node index."""
    ordered = sorted(manifests, key=lambda m: m.node.index)
    first = ordered[0]
    distinct = {entry.key: entry.size_bytes for manifest in ordered for entry in manifest.files}
    return Commit(
        name=first.name,
        step=step_of(first.name) if step_of(first.name) is not None else first.step,
        attempt=first.attempt,
        save_id=first.save_id,
        reason=first.reason,
        created_at=first.created_at,
        committed_at=committed_at,
        world_size=first.world_size,
        meta=first.meta,
        files=len(distinct),
        size_bytes=sum(distinct.values()),
        manifests=tuple(manifest_entry(m, raw[m.node.index]) for m in ordered),
    )


def manifest_entry(manifest: Manifest, raw: bytes) -> ManifestEntry:
    """Return how a commit names a manifest that is stored as ``raw``."""
    return ManifestEntry(
        key=keys.manifest(manifest.name, manifest.attempt, Node(manifest.node.index, manifest.node.count)),
        size_bytes=len(raw),
        crc64nvme=checksum.to_text(checksum.checksum(raw)),
    )


def attempt_of(key: str, name: str) -> str | None:
    """Return the attempt whose manifest lies under ``key``, or ``None`` if the key is not that of a manifest of ``name``."""
    inside = key.removeprefix(keys.manifests(name))
    attempt, slash, document = inside.partition("/")
    is_manifest = inside != key and slash and "/" not in document and document.endswith(".json")
    return attempt if is_manifest else None
