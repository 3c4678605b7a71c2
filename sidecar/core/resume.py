"""Which checkpoint a run continues from, and whether the store still holds what its writers recorded (I1, I2, I5)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sidecar.core import checksum
from sidecar.core.layout import Share, left_out, private_files
from sidecar.core.local import Finished
from sidecar.core.manifest import Commit, FileEntry, Manifest, ManifestEntry
from trainer_hook.contract import FINAL, META_TRAIN_CALL, ContractError, Node, rfc3339, step_of


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A checkpoint that was not used, and why."""

    checkpoint: str
    reason: str


def newest_first(names: Iterable[str], *, and_final: bool = False) -> list[str]:
    """Return the steps among folder names, newest first.

    Args:
        names: Any names; those that are no checkpoint's are left out.
        and_final: Put ``final`` before them. It is no step to continue from.
    """
    known = set(names)
    steps = [(step, name) for name in known if (step := step_of(name)) is not None]
    return [FINAL] * (and_final and FINAL in known) + [name for _, name in sorted(steps, reverse=True)]


def matches_train_call(meta: Mapping[str, Any], train_call: int | None) -> bool:
    """Whether a checkpoint belongs to the ``train()`` call that asks. ``None`` asks for any."""
    return train_call is None or meta.get(META_TRAIN_CALL, 0) == train_call


def check_manifest(entry: ManifestEntry, raw: bytes) -> None:
    """Compare a manifest's bytes with what the commit recorded of them.

    Raises:
        ContractError: They differ.
    """
    if len(raw) != entry.size_bytes:
        raise ContractError(f"{entry.key}: {len(raw)} bytes, the commit says {entry.size_bytes}")
    got = checksum.to_text(checksum.checksum(raw))
    if got != entry.crc64nvme:
        raise ContractError(f"{entry.key}: crc64nvme {got}, the commit says {entry.crc64nvme}")


def check_node_set(commit: Commit, manifests: Sequence[Manifest]) -> None:
    """Compare the manifests of a commit with each other, and with what it repeats of them.

    Raises:
        ContractError: A node is missing or twice, or they are not of one attempt, checkpoint and node count, or the commit
            says something else than its first manifest.
    """
    counts = {m.node.count for m in manifests}
    if counts != {len(manifests)} or sorted(m.node.index for m in manifests) != list(range(len(manifests))):
        found = ", ".join(f"{m.node.index} of {m.node.count}" for m in manifests)
        raise ContractError(f"{commit.name}: its manifests are of node {found}, not of one each")
    if any(m.attempt != commit.attempt or m.name != commit.name for m in manifests):
        raise ContractError(f"{commit.name}: a manifest is of another attempt or checkpoint than the commit")
    # Nothing names the checksum of the commit itself: a bit that flipped in it shows here.
    first = min(manifests, key=lambda m: m.node.index)
    if commit.step != (named if (named := step_of(commit.name)) is not None else first.step):
        raise ContractError(f"{commit.name}: the commit says step {commit.step}")
    if any(m.save_id != commit.save_id for m in manifests):
        raise ContractError(f"{commit.name}: its manifests are of different saves of the step")
    for name in ("reason", "created_at", "world_size", "meta"):
        if (says := getattr(commit, name)) != getattr(first, name):
            raise ContractError(f"{commit.name}: the commit says {name} {says!r}, its first manifest {getattr(first, name)!r}")


def check_listing(manifests: Iterable[Manifest], sizes: Mapping[str, int]) -> None:
    """Compare the listing of the store with the manifests before anything is downloaded.

    Raises:
        ContractError: An object is missing or of another size.
    """
    for manifest in manifests:
        for entry in manifest.files:
            if entry.key not in sizes:
                raise ContractError(f"{entry.key}: missing in the store")
            if sizes[entry.key] != entry.size_bytes:
                raise ContractError(
                    f"{entry.key}: {sizes[entry.key]} bytes in the store, its writer recorded {entry.size_bytes}"
                )


def may_replace(local: Finished | None, commit: Commit) -> bool:
    """Whether a download may take the place of what lies on the volume under its name.

    Args:
        local: The finished checkpoint there; ``None`` for nothing, a half-written or a rejected one.
        commit: What is to be downloaded.
    """
    return local is None or local.restored_from is not None or local.attempt == commit.attempt


def differs_from_its_commit(local: Finished, commit: Commit) -> bool:
    """Whether a lone node's checkpoint is the one that was committed, finished once, and yet has not the same files now."""
    is_the_same = (local.attempt, rfc3339(local.created_at_s)) == (commit.attempt, commit.created_at)
    return is_the_same and (len(local.files), local.size_bytes) != (commit.files, commit.size_bytes)


def files_for(node: Node, manifests: Sequence[Manifest], share: Share | None = None) -> list[FileEntry]:
    """Return what a node downloads.

    Args:
        node: Whose file it is to be where several nodes have one path; else the lowest index's.
        manifests: Of all nodes that saved.
        share: The node's ranks, if it asks for no more than they read; ``None``: every file of every node.

    Returns:
        In the order of their paths, but last what most likely only ranks of other nodes read.
    """
    chosen: dict[str, FileEntry] = {}
    ordered = sorted(manifests, key=lambda m: (m.node.index != node.index, m.node.index))
    for manifest in ordered:
        for entry in manifest.files:
            chosen.setdefault(entry.path, entry)
    unwanted = left_out(manifests, share, nodes=node.count)
    own = {entry.path for entry in ordered[0].files}
    others = private_files(manifests).keys() - own
    return [chosen[path] for path in sorted(chosen.keys() - unwanted, key=lambda path: (path in others, path))]
