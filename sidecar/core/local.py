"""What a directory on the volume is: a finished checkpoint, one that is still written, or one that is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer_hook.contract import (
    FINAL,
    META_PARTIAL,
    META_RESTORED,
    ContractError,
    ListedFile,
    Marker,
    Node,
    check_path,
    epoch_seconds,
    parse_marker,
    rfc3339,
    step_of,
)

_GROWING = "-growing"


def is_growing(stamp: str) -> bool:
    """Whether a stamp is that of a file that was still being written."""
    return stamp.endswith(_GROWING)


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A regular file as the walk saw it; inode and time tell later whether it is still the same."""

    path: str
    size_bytes: int
    mtime_ns: int
    inode: int

    @property
    def stamp(self) -> str:
        """What changes when the file is written or replaced, as far as the file system tells."""
        return f"{self.inode:x}-{self.mtime_ns:x}-{self.size_bytes:x}"

    @property
    def growing_stamp(self) -> str:
        """What stays the same while the file is being written."""
        return f"{self.inode:x}{_GROWING}"


@dataclass(frozen=True, slots=True)
class FoundMarker:
    """The marker as found. ``signature`` changes whenever the marker is written again: it names this version."""

    content: bytes
    signature: str
    mtime_ns: int

    @property
    def mtime_s(self) -> float:
        """When it was written, in epoch seconds."""
        return self.mtime_ns / 1e9


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A directory with a checkpoint's name. ``irregular`` lists what is neither file nor directory, with its kind."""

    name: str
    files: tuple[FoundFile, ...]
    irregular: tuple[tuple[str, str], ...]
    marker: FoundMarker


@dataclass(frozen=True, slots=True)
class Identity:
    """What this pod is when a marker does not say: from the environment. ``node`` ``None`` means one of unknown many."""

    node: Node | None
    attempt: str


@dataclass(frozen=True, slots=True)
class Finished:
    """A checkpoint that the trainer finished, with everything that its marker left open filled in."""

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

    @property
    def size_bytes(self) -> int:
        """Sum of its files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def resume_step(self) -> int | None:
        """The step that a run can continue from here; ``None`` for ``final``, which has no optimizer state."""
        return None if self.name == FINAL else self.step

    @property
    def restored_from(self) -> str | None:
        """Checksum of the commit that this directory was downloaded from, if it was."""
        value = self.meta.get(META_RESTORED)
        return value if isinstance(value, str) else None

    @property
    def is_partial(self) -> bool:
        """Whether files of other nodes' ranks were left out of the download."""
        return META_PARTIAL in self.meta

    @property
    def urgent(self) -> bool:
        """Whether it goes before every periodic one."""
        return self.reason in ("jit", "final") or self.name == FINAL


def is_whole(marker: bytes) -> bool:
    """Whether a marker's bytes cannot be the beginning of a longer one: empty and cut-off markers may be."""
    return marker.rstrip().endswith(b"}")


def judge(found: FoundCheckpoint, identity: Identity) -> Finished:
    """Return the finished checkpoint that a directory holds.

    Raises:
        ContractError: The reason why it is refused.
    """
    marker = parse_marker(found.marker.content, name=found.name)
    for path, kind in found.irregular:
        raise ContractError(f"{path!r} is a {kind}; only regular files inside the directory are taken")
    files = _confirmed(found.files, marker)
    if (later := written_after(files, found.marker.mtime_ns)) is not None:
        raise ContractError(f"{later.path!r} was written after the marker: write the marker again")
    node = marker.node or identity.node
    if node is None:
        raise ContractError("this pod is one of several and neither the marker nor CKPT_NODE_COUNT says of how many")
    if node.count > 1 and marker.attempt is None:
        # Each pod's own id would be another attempt, and their manifests would wait for each other for ever.
        raise ContractError(
            f"it is one of {node.count} nodes' and its marker has no attempt: "
            'put the same "attempt" into the marker of every node, a new one for each start of the job'
        )
    if not files and node.count == 1:
        raise ContractError("it holds no files: write them before the marker")
    step = marker.step if marker.step is not None else step_of(found.name)
    return Finished(
        name=found.name,
        version=found.marker.signature,
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
    )


def written_after(files: Iterable[FoundFile], marker_mtime_ns: int) -> FoundFile | None:
    """Return a file that is not what was finished: it was written to after the marker; ``None`` if there is none.

    A trainer that dies while it rewrites a checkpoint in place leaves the old marker over new bytes.
    """
    return next((file for file in files if file.mtime_ns > marker_mtime_ns), None)


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
