"""Rules by which both containers distrust a finished checkpoint on the volume. The facts are read by each itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer_hook.contract.marker import Marker
from trainer_hook.contract.names import META_RESTORED, META_RESTORED_BOOT, ContractError
from trainer_hook.contract.typed_json import epoch_seconds, rfc3339, timestamp, typed


def written_after(files_ns: Iterable[tuple[str, int]], marked_ns: int) -> str | None:
    """Return the path of a file that was written to after the marker; ``None``: there is none.

    A trainer that dies while it rewrites a checkpoint in place leaves the old marker with new bytes.

    Args:
        files_ns: Path and modification time of each file, epoch nanoseconds.
        marked_ns: Modification time of the marker.
    """
    return next((path for path, changed_ns in files_ns if changed_ns > marked_ns), None)


def restored_from(meta: Mapping[str, Any]) -> str | None:
    """Return the checksum of the commit that a directory was downloaded from; ``None``: it was not downloaded."""
    value = meta.get(META_RESTORED)
    return value if isinstance(value, str) else None


def was_downloaded_in(meta: Mapping[str, Any], boot: str) -> bool:
    """Whether a checkpoint was downloaded by the run of the kernel with that id; an empty id is unknown, so of no use.

    A download is not synchronized to the disk. What a power failure leaves of it may have the right sizes and zeros for bytes.
    """
    return restored_from(meta) is not None and bool(boot) and meta.get(META_RESTORED_BOOT) == boot


@dataclass(frozen=True, slots=True)
class SaveIdentity:
    """What tells one writing of a step from another. ``None``: unknown."""

    attempt: str | None
    save_id: str | None
    finished_at: str | None
    """RFC 3339 in UTC with milliseconds, by the node that wrote it; of a commit, node 0."""
    is_committed: bool
    """It is that of a commit: as the sidecar says, or in the marker of a download."""


def identity_of(marker: Marker, *, marked_s: float | None) -> SaveIdentity:
    """Return the identity of the writing that a marker belongs to.

    ``marked_s``: modification time of the marker, epoch seconds; ``None``: unknown.
    """
    is_copy = restored_from(marker.meta) is not None  # then the time of its marker is that of the download
    finished_s = epoch_seconds(marker.created_at) if marker.created_at else None if is_copy else marked_s
    try:
        finished_at = None if finished_s is None else rfc3339(finished_s)
    except (ValueError, OverflowError, OSError):  # a modification time that is not of this calendar
        finished_at = None
    return SaveIdentity(marker.attempt, marker.save_id, finished_at, is_copy)


def parse_identity(fields: Any) -> SaveIdentity | None:
    """Read the ``save`` of the sidecar's answer to a resume request; ``None``: an older sidecar does not say, or malformed."""
    if not isinstance(fields, Mapping):
        return None
    try:
        attempt, save_id, at = typed(fields, "attempt", str), typed(fields, "save_id", str), timestamp(fields, "finished_at")
        return SaveIdentity(attempt, save_id, None if at is None else rfc3339(epoch_seconds(at)), is_committed=True)
    except ContractError:
        return None


def may_be_same_save(one: SaveIdentity, other: SaveIdentity) -> bool:
    """Whether two directories of one name, on two nodes, may be of the same writing of the step.

    Each node has its own time of a writing, a commit has node 0's. The marker of a download has no ``save_id``. A marker
    without an attempt belongs to another attempt in each pod that reads it: then the time alone tells.
    """
    named = (one.attempt, other.attempt), (one.save_id, other.save_id)
    if any(mine != theirs for mine, theirs in named if mine is not None and theirs is not None):
        return False
    if None in (one.attempt, other.attempt):
        return one.finished_at == other.finished_at
    is_comparable = one.is_committed and other.is_committed and None not in (one.finished_at, other.finished_at)
    return not is_comparable or one.finished_at == other.finished_at
