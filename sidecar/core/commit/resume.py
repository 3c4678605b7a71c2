"""Choice of the checkpoint to resume from, and validation of its documents and listing (FORMAT.md, I1, I2, I5)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sidecar.core.format import checksum
from sidecar.core.format.attempts import began_later, goes_after
from sidecar.core.format.found_checkpoint import Finished
from sidecar.core.format.manifest import Commit, FileEntry, Manifest, ManifestEntry
from sidecar.core.format.obstacles import contradiction
from sidecar.core.format.rank_layout import Share, left_out, private_files
from trainer_hook.contract import FINAL, ContractError, Node, rfc3339, step_of, train_call_of


class MissingObject(ContractError):
    """The store does not have an object that a commit or manifest names."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key}: missing in the store")
        self.key = key


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A checkpoint that was not used, with the reason."""

    checkpoint: str
    reason: str
    may_be_whole: bool = False
    """It is committed and not known to be damaged: the next request tries it again."""


def newest_first(names: Iterable[str], *, and_final: bool = False) -> list[str]:
    """Return the steps among folder names, newest first.

    Args:
        names: Any names; other ones than checkpoints' are left out.
        and_final: Also return ``final``, first. A run cannot resume from it.
    """
    known = set(names)
    steps = [(step, name) for name in known if (step := step_of(name)) is not None]
    return [FINAL] * (and_final and FINAL in known) + [name for _, name in sorted(steps, reverse=True)]


def steps_before(names: Sequence[str], step: int | None) -> list[str]:
    """Return the names of lower steps than ``step``, without ``final``; ``None``: all names. Their order stays."""
    return [name for name in names if step is None or ((of := step_of(name)) is not None and of < step)]


def next_to_try(names: Sequence[str], tried: Collection[str], *, local_step: int | None) -> str | None:
    """Return the first name that was not tried; ``None``: there is none, or its step is not newer than ``local_step``.

    Args:
        names: Steps in the store, newest first.
        tried: Those that could not be used.
        local_step: The newest step on the volume that needs no download; ``None``: there is none.
    """
    name = next((name for name in names if name not in tried), None)
    if name is None or local_step is None:
        return name
    step = step_of(name)
    return name if step is not None and step > local_step else None


def matches_train_call(meta: Mapping[str, Any], train_call: int | None) -> bool:
    """Whether a checkpoint belongs to the given ``train()`` call; ``None``: any call."""
    return train_call is None or train_call_of(meta) == train_call


def check_manifest(entry: ManifestEntry, raw: bytes) -> None:
    """Compare a manifest's bytes with the size and checksum in the commit.

    Raises:
        ContractError: They differ.
    """
    if len(raw) != entry.size_bytes:
        raise ContractError(f"{entry.key}: {len(raw)} bytes, the commit says {entry.size_bytes}")
    got = checksum.text_of(raw)
    if got != entry.crc64nvme:
        raise ContractError(f"{entry.key}: crc64nvme {got}, the commit says {entry.crc64nvme}")


def check_node_set(commit: Commit, manifests: Sequence[Manifest]) -> None:
    """Compare the manifests of a commit with each other, and with the fields that the commit repeats.

    Raises:
        ContractError: A node is missing or twice, or they are not of one attempt, checkpoint and node count, or the commit
            contradicts its first manifest.
    """
    counts = {m.node.count for m in manifests}
    if counts != {len(manifests)} or sorted(m.node.index for m in manifests) != list(range(len(manifests))):
        found = ", ".join(f"{m.node.index} of {m.node.count}" for m in manifests)
        raise ContractError(f"{commit.name}: its manifests are of node {found}, not of one each")
    if any(m.attempt != commit.attempt or m.name != commit.name for m in manifests):
        raise ContractError(f"{commit.name}: a manifest is of another attempt or checkpoint than the commit")
    # The commit has no checksum of its own: a flipped bit in it is detected here.
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
        MissingObject: An object is missing.
        ContractError: An object has another size.
    """
    for entry in unlike_listing(manifests, sizes):
        if entry.key not in sizes:
            raise MissingObject(entry.key)
        raise ContractError(f"{entry.key}: {sizes[entry.key]} bytes in the store, its writer recorded {entry.size_bytes}")


def unlike_listing(manifests: Iterable[Manifest], sizes: Mapping[str, int]) -> Iterator[FileEntry]:
    """Yield the entries that are missing in a listing, or have another size there."""
    for manifest in manifests:
        yield from (entry for entry in manifest.files if sizes.get(entry.key) != entry.size_bytes)


def check_paths(commit: Commit, entries: Iterable[FileEntry]) -> None:
    """Compare the paths of all nodes' files with each other.

    Raises:
        ContractError: One path is a file of one node and a directory of another: no volume can hold both.
    """
    if why := contradiction(entry.path for entry in entries):
        raise ContractError(f"{commit.name}: {why}, of different nodes")


def may_replace(local: Finished | None, commit: Commit, *, is_chosen: bool, is_superseded: bool = False) -> bool:
    """Whether a download requested by the trainer may replace the directory of that name on the volume.

    Args:
        local: The finished checkpoint in it; ``None``: none, or an unfinished or rejected one.
        commit: The commit to download.
        is_chosen: The trainer asks for this very step: in a job of several nodes, node 0 has chosen it for all. One node's part
            of it by another attempt is not complete, and the commit is. Before that choice, the nodes may be about to commit
            their parts of a later attempt instead.
        is_superseded: The sidecar does not send it: a later attempt has committed the step, or a newer step is durable.
    """
    if local is None or local.restored_from is not None or is_superseded:
        return True
    if local.node.count > 1 and (is_chosen or began_later(commit.attempt, local.attempt)):
        return True
    return local.attempt == commit.attempt or _is_of_the_same_marker(local, commit)


def may_replace_beside_trainer(local: Finished | None, *, is_unchanged: bool) -> bool:
    """Whether a download requested by a person may replace the directory of that name on the volume.

    The trainer may be between two files of a save, and would write the others into the downloaded checkpoint.

    Args:
        local: The finished checkpoint in it; ``None``: an unfinished or a rejected one.
        is_unchanged: Its files are unchanged since it was finished.
    """
    return local is not None and local.restored_from is not None and is_unchanged


def differs_from_its_commit(local: Finished, commit: Commit) -> bool:
    """Whether a single-node checkpoint has the marker under which it was committed, but other files than the commit."""
    is_other = (len(local.files), local.size_bytes) != (commit.files, commit.size_bytes)
    return is_other and _is_of_the_same_marker(local, commit)


def is_outdated(local: Finished, commit: Commit) -> bool:
    """Whether a later attempt has committed the step of a checkpoint that an earlier pod left on the volume.

    The volume of an earlier pod may come back after another pod trained on another one.
    """
    if not local.is_inherited or local.attempt == commit.attempt or _is_of_the_same_marker(local, commit):
        return False
    ours = rfc3339(local.created_at_s)
    return commit.created_at is not None and goes_after(commit.attempt, commit.created_at, local.ordered_as, ours)


def _is_of_the_same_marker(local: Finished, commit: Commit) -> bool:
    """Whether a commit was made under the current marker of a checkpoint on the volume.

    A marker without an attempt belongs to a different attempt in each pod that reads it.
    """
    is_same_attempt = local.attempt == commit.attempt or not local.names_attempt
    return is_same_attempt and rfc3339(local.created_at_s) == commit.created_at


def files_for(node: Node, manifests: Sequence[Manifest], share: Share | None = None) -> list[FileEntry]:
    """Return the files that a node downloads.

    Args:
        node: If several nodes have one path, this node's file is chosen; else the lowest index's.
        manifests: Manifests of all nodes that saved.
        share: The node's ranks, if it needs the files that they read alone; ``None``: every file of every node.

    Returns:
        The files in order of their paths; those that probably only ranks of other nodes read come last.
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
