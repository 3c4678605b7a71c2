"""Classification of a directory on the volume: a finished, an unfinished or a rejected checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer_hook.contract import (
    FINAL,
    META_PARTIAL,
    ContractError,
    ListedFile,
    Marker,
    Node,
    SaveIdentity,
    check_path,
    epoch_seconds,
    parse_marker,
    restored_from,
    rfc3339,
    step_of,
    written_after,
)

CLOCK_TICK_NS = 50_000_000
"""Two times of one call may differ by this much: the kernel's clock of files counts in milliseconds."""
COPIED_NS = 10_000_000_000
"""A marker that is older by more than this than the latest change of its directories was copied there with its time."""
_GROWING = "-growing"


def is_growing(stamp: str) -> bool:
    """Whether a stamp belongs to a file that was still being written."""
    return stamp.endswith(_GROWING)


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A regular file found by the walk; inode and modification time show later whether it has changed."""

    path: str
    size_bytes: int
    mtime_ns: int
    inode: int

    @property
    def stamp(self) -> str:
        """Version of the file: changes when it is written or replaced, as far as the file system shows it."""
        return f"{self.inode:x}-{self.mtime_ns:x}-{self.size_bytes:x}"

    @property
    def growing_stamp(self) -> str:
        """Identity of the file: stays the same while it is being written."""
        return f"{self.inode:x}{_GROWING}"


@dataclass(frozen=True, slots=True)
class FoundMarker:
    """A marker. Its ``version`` changes when the marker is written again."""

    content: bytes
    version: str
    mtime_ns: int
    changed_ns: int = field(default=0, compare=False)
    """Time of the last change of its inode: of the write, or of the rename to its name."""

    @property
    def mtime_s(self) -> float:
        """Time of its write, epoch seconds."""
        return self.mtime_ns / 1e9


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A directory with a checkpoint's name. ``irregular``: its entries that are not taken, with their kind."""

    name: str
    files: tuple[FoundFile, ...]
    irregular: tuple[tuple[str, str], ...]
    marker: FoundMarker
    entries_changed_ns: int = field(default=0, compare=False)
    """When an entry last came into one of its directories, or left it; read after the walk."""


@dataclass(frozen=True, slots=True)
class Identity:
    """This pod's defaults for markers, from the environment. ``node`` ``None``: one of several, their count unknown."""

    node: Node | None
    attempt: str
    inherited: frozenset[str] = frozenset()
    """Versions of the markers that an earlier pod left on the volume."""
    foreign: frozenset[str] = frozenset()
    """Versions of the markers that another run left there."""
    nodes: Mapping[str, Node | None] = field(default_factory=dict)
    """Node of the markers that another node than ``node`` left there, by version: the job had another number of nodes."""

    def node_of(self, marker: Marker, version: str) -> Node | None:
        """Return the node of a marker; ``None``: one of several, their count unknown. A download is no part of a step."""
        if marker.node is not None:
            return marker.node
        return self.node if restored_from(marker.meta) is not None else self.nodes.get(version, self.node)


@dataclass(frozen=True, slots=True)
class Finished:
    """A checkpoint that the trainer finished; fields that its marker leaves out have the pod's defaults."""

    name: str
    version: str
    step: int | None
    reason: str | None
    attempt: str
    node: Node
    created_at_s: float
    world_size: int | None
    files: tuple[FoundFile, ...]
    meta: Mapping[str, Any]
    step_seconds: float | None = None
    save_id: str | None = None
    marked_at_s: float = 0.0
    """Time of its marker in epoch seconds, by the file system: ``created_at`` in the marker may be by another clock."""
    names_attempt: bool = True
    """Whether the marker names the attempt. Otherwise ``attempt`` is that of the pod reading the directory, which may be later
    than the pod that wrote it."""
    is_inherited: bool = False
    """Whether an earlier pod left it on the volume, so that the epoch of this pod says nothing about it."""

    @property
    def ordered_as(self) -> str:
        """Attempt by whose start it is ordered; empty: an earlier pod left it without one, so the time of its end decides."""
        return "" if self.is_inherited and not self.names_attempt else self.attempt

    @property
    def size_bytes(self) -> int:
        """Sum of its files' sizes."""
        return sum(file.size_bytes for file in self.files)

    @property
    def resume_step(self) -> int | None:
        """The step that a run can resume from; ``None`` for ``final``, which has no optimizer state."""
        return None if self.name == FINAL else self.step

    @property
    def restored_from(self) -> str | None:
        """Checksum of the commit that this directory was downloaded from; ``None``: it was not downloaded."""
        return restored_from(self.meta)

    @property
    def identity(self) -> SaveIdentity:
        """The writing of the step, as its commit will name it, or the commit that it was downloaded from does."""
        return SaveIdentity(self.attempt, self.save_id, rfc3339(self.created_at_s), is_committed=True)

    @property
    def is_partial(self) -> bool:
        """Whether the download left out files of other nodes' ranks."""
        return META_PARTIAL in self.meta

    @property
    def urgent(self) -> bool:
        """Whether it has priority over every periodic checkpoint."""
        return self.reason in ("jit", "final") or self.name == FINAL


def is_whole(marker: bytes) -> bool:
    """Whether a marker's bytes are complete. An empty or truncated marker may be the beginning of a longer one."""
    return marker.rstrip().endswith(b"}")


def may_lack_files(found: FoundCheckpoint) -> bool:
    """Whether files may be missing: entries left its directories, or came, after a marker that does not list the files.

    A rotation deletes entry by entry, and the marker is not always the first. A copy that keeps times gives the marker an old
    one, and its inode the present one: more files may follow.
    """
    marked_ns = min(found.marker.changed_ns, found.marker.mtime_ns + COPIED_NS)
    if found.entries_changed_ns <= marked_ns + CLOCK_TICK_NS:
        return False
    if written_after(_times_ns(found.files), found.marker.mtime_ns) is not None:  # a rotation writes nothing
        return False
    try:
        return parse_marker(found.marker.content, name=found.name).files is None
    except ContractError:
        return False


def judge(found: FoundCheckpoint, identity: Identity) -> Finished:
    """Return the finished checkpoint that a directory holds.

    Raises:
        ContractError: It is rejected; the text is the reason.
    """
    marker = parse_marker(found.marker.content, name=found.name)
    for path, kind in found.irregular:
        raise ContractError(f"{path!r} is a {kind}; only regular files of its own are taken")
    files = _confirmed(found.files, marker)
    if (later := written_after(_times_ns(files), found.marker.mtime_ns)) is not None:
        raise ContractError(f"{later!r} was written after the marker: write the marker again")
    node = identity.node_of(marker, found.marker.version)
    if node is None:
        raise ContractError("this pod is one of several and neither the marker nor CKPT_NODE_COUNT says of how many")
    if node.count > 1 and marker.attempt is None:
        # With each pod's own id as the attempt, the nodes' manifests would wait for each other for ever.
        raise ContractError(
            f"it is one of {node.count} nodes' and its marker has no attempt: "
            'put the same "attempt" into the marker of every node, a new one for each start of the job'
        )
    if not files and node.count == 1:
        raise ContractError("it holds no files: write them before the marker")
    step = marker.step if marker.step is not None else step_of(found.name)
    return Finished(
        name=found.name,
        version=found.marker.version,
        step=step,
        reason=marker.reason or ("final" if found.name == FINAL else None),
        attempt=marker.attempt or identity.attempt,
        node=node,
        created_at_s=epoch_seconds(marker.created_at) if marker.created_at else _in_calendar(found.marker.mtime_s),
        world_size=marker.world_size,
        files=files,
        meta=marker.meta,
        step_seconds=marker.global_step_seconds,
        save_id=marker.save_id,
        marked_at_s=found.marker.mtime_s,
        names_attempt=marker.attempt is not None,
        is_inherited=found.marker.version in identity.inherited,
    )


def _times_ns(files: Iterable[FoundFile]) -> Iterator[tuple[str, int]]:
    return ((file.path, file.mtime_ns) for file in files)


def _in_calendar(mtime_s: float) -> float:
    try:
        rfc3339(mtime_s)
    except (ValueError, OverflowError, OSError):
        raise ContractError("the modification time of its marker is not of this calendar: write the marker again") from None
    return mtime_s


def _confirmed(files: tuple[FoundFile, ...], marker: Marker) -> tuple[FoundFile, ...]:
    if marker.files is None:
        for file in files:
            check_path(file.path)
        return files
    there = {file.path: file for file in files}
    return tuple(_confirm(listed, there) for listed in marker.files)


def _confirm(listed: ListedFile, there: Mapping[str, FoundFile]) -> FoundFile:
    file = there.get(listed.path)
    if file is None:
        raise ContractError(f"{listed.path!r} is listed in the marker but is not there")
    if file.size_bytes != listed.size_bytes:
        raise ContractError(f"{listed.path!r} has {file.size_bytes} bytes, the marker says {listed.size_bytes}")
    return file
