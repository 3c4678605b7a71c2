"""Decision about a commit: commit now, wait, or upload files again (FORMAT.md, I2, I3, I6).

There is no coordinator. Every node reads the manifests of its attempt and the listing of the checkpoint's objects, and decides
by itself; a node that finds nothing missing writes the commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sidecar.core.format import checksum, keys
from sidecar.core.format.found_checkpoint import Finished
from sidecar.core.format.manifest import Commit, FileEntry, Manifest, ManifestEntry, NodeOf
from trainer_hook.contract import Node, rfc3339, step_of


@dataclass(frozen=True, slots=True)
class Object:
    """An object as the listing of the store shows it."""

    size_bytes: int
    etag: str


@dataclass(frozen=True, slots=True)
class ReadyToCommit:
    """Nothing is missing: the step can be committed."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Other nodes have to act first."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reupload:
    """This node has to upload files again, each under the key given, and write a new manifest."""

    files: Mapping[str, str]
    """Key by path. Empty: the manifest alone is missing."""
    reason: str


@dataclass(frozen=True, slots=True)
class GiveWay:
    """A later attempt writes the step now: this attempt stops, because it would overwrite that attempt's files."""

    reason: str


Decision = ReadyToCommit | Wait | Reupload | GiveWay
MOVED = "another node uses the same path for other content"
GONE = "the store no longer has what was sent"


def decide(manifests: Sequence[Manifest], listing: Mapping[str, Object], *, me: Node) -> Decision:
    """Return this node's next action for the commit of a checkpoint.

    Args:
        manifests: All manifests of this attempt for a job of ``me.count`` nodes, in any order, this node's included.
        listing: Every object below the checkpoint's folder, by key.
        me: This node.

    Only manifests of the same save of the step count; a node whose manifest is of another save counts as missing.

    If several nodes use one key, the lowest index owns it. The others, if their content differs, move it below their own
    folder. After all nodes have uploaded, the owner alone uploads again what was overwritten or is missing. So nodes do not
    overwrite each other in turns, and no manifest changes once a commit names it.
    """
    mine = next((m for m in manifests if m.node.index == me.index), None)
    if mine is None:
        # It was deleted when an earlier version of the step was revoked. The files are there, so this costs one request.
        return Reupload({}, "this node's own manifest is not in the store any more")
    manifests = [m for m in manifests if m.save_id == mine.save_id]
    by_index = {m.node.index: m for m in manifests}
    expected = _expected_content(manifests)
    if moved := _moved(mine, expected):
        return Reupload(moved, MOVED)
    missing = [index for index in range(me.count) if index not in by_index]
    if missing:
        return waiting_for(missing, count=me.count)
    if owned := _owned_and_broken(mine, listing, expected):
        return Reupload(owned, GONE)
    for manifest in manifests:
        for entry in manifest.files:
            content = expected[entry.key]
            if content.crc64nvme != entry.crc64nvme or not _is_there(entry, listing, expected):
                owner = content.owner if content.crc64nvme == entry.crc64nvme else manifest.node.index
                return Wait(f"node {owner} has to send {entry.path} again")
    return ReadyToCommit()


def to_reupload(manifests: Sequence[Manifest], listing: Mapping[str, Object]) -> dict[int, Mapping[str, str]]:
    """Return the files (key by path) that each node has to upload again, by node index, as ``decide`` does per node.

    ``manifests`` are those of all nodes. Nodes without such files are left out.
    """
    expected = _expected_content(manifests)
    found = {m.node.index: _moved(m, expected) or _owned_and_broken(m, listing, expected) for m in manifests}
    return {index: files for index, files in found.items() if files}


def waiting_for(missing: Sequence[int], *, count: int) -> Wait:
    """Return the decision to wait for the manifests of these nodes."""
    named = ", ".join(map(str, missing[:8]))
    return Wait(f"waiting for node {named}{' …' if len(missing) > 8 else ''} of {count}")


@dataclass(frozen=True, slots=True)
class _Expected:
    """Expected content of a key: that of the lowest node that uses it. ``etags``: of all nodes with this content."""

    owner: int
    crc64nvme: str
    etags: set[str]


def _expected_content(manifests: Iterable[Manifest]) -> dict[str, _Expected]:
    expected: dict[str, _Expected] = {}
    for manifest in sorted(manifests, key=lambda m: m.node.index):
        for entry in manifest.files:
            content = expected.setdefault(entry.key, _Expected(manifest.node.index, entry.crc64nvme, set()))
            if content.crc64nvme == entry.crc64nvme:
                content.etags.add(entry.etag)
    return expected


def _moved(mine: Manifest, expected: Mapping[str, _Expected]) -> Mapping[str, str]:
    node = Node(mine.node.index, mine.node.count)
    return {
        entry.path: keys.node_file(mine.name, mine.attempt, node, entry.path)
        for entry in mine.files
        if expected[entry.key].crc64nvme != entry.crc64nvme
    }


def _owned_and_broken(mine: Manifest, listing: Mapping[str, Object], expected: Mapping[str, _Expected]) -> Mapping[str, str]:
    return {
        entry.path: entry.key
        for entry in mine.files
        if expected[entry.key].owner == mine.node.index and not _is_there(entry, listing, expected)
    }


def _is_there(entry: FileEntry, listing: Mapping[str, Object], expected: Mapping[str, _Expected]) -> bool:
    there = listing.get(entry.key)
    if there is None or there.size_bytes != entry.size_bytes:
        return False
    # Any node with this content may have written last. Empty: the store gives no etags.
    etags = expected[entry.key].etags
    return there.etag in etags or etags == {""}


class ListingCheck:
    """Compares the manifests of a commit with the listing of the checkpoint's objects."""

    def __init__(self, listing: Mapping[str, Object]) -> None:
        self._listing = listing
        self._unproven: dict[str, FileEntry] = {}
        self._proven: set[str] = set()

    def add(self, manifest: Manifest) -> None:
        """Add the manifest of one node."""
        for entry in manifest.files:
            there = self._listing.get(entry.key)
            # Any node with this content may have written last. Empty: the store gives no etags.
            is_there = there is not None and there.size_bytes == entry.size_bytes and entry.etag in (there.etag, "")
            if is_there:
                self._proven.add(entry.key)
                self._unproven.pop(entry.key, None)
            elif entry.key not in self._proven:
                self._unproven[entry.key] = entry

    def unproven(self) -> list[FileEntry]:
        """Return the files whose object is missing, or differs in size or from all recorded etags."""
        return list(self._unproven.values())


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


def commit_of(
    manifests: Sequence[Manifest], raw: Mapping[int, bytes], *, committed_at: str, epoch: int | None = None
) -> Commit:
    """Return the commit that names the manifests of all nodes.

    Args:
        manifests: The manifests.
        raw: Their stored bytes, by node index.
        committed_at: Present time, RFC 3339.
        epoch: Epoch of the prefix under which the checkpoint was written; ``None``: unknown.
    """
    ordered = sorted(manifests, key=lambda m: m.node.index)
    first = ordered[0]
    distinct = {entry.key: entry.size_bytes for manifest in ordered for entry in manifest.files}
    return Commit(
        name=first.name,
        step=step_of(first.name) if step_of(first.name) is not None else first.step,
        attempt=first.attempt,
        save_id=first.save_id,
        epoch=epoch,
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
    """Return the commit's entry for a manifest. ``raw``: its stored bytes."""
    crc64nvme = checksum.text_of(raw)
    return ManifestEntry(key=manifest.key, size_bytes=len(raw), crc64nvme=crc64nvme)


def attempt_of(key: str, name: str) -> str | None:
    """Return the attempt in a manifest's key, or ``None`` if ``key`` is not a manifest of checkpoint ``name``."""
    inside = key.removeprefix(keys.manifests(name))
    attempt, slash, document = inside.partition("/")
    is_manifest = inside != key and slash and "/" not in document and document.endswith(".json")
    return attempt if is_manifest else None
