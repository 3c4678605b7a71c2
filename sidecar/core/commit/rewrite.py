"""Decision about a finished checkpoint whose step is already committed: equal, replace the commit, or keep the commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sidecar.core.format.attempts import goes_after, is_later, seconds
from sidecar.core.format.manifest import Commit, FileEntry, Manifest

TORN = "its files changed after its marker was written: the store keeps what was committed"


@dataclass(frozen=True, slots=True)
class AlreadyCommitted:
    """The store holds exactly this content: the checkpoint is durable."""


@dataclass(frozen=True, slots=True)
class KeepExisting:
    """The commit in the store stays."""

    reason: str
    torn: bool = False
    """The local directory has changed since its marker was written."""


@dataclass(frozen=True, slots=True)
class Replace:
    """The local checkpoint is later and replaces the commit."""


def rewrite(
    *,
    attempt: str,
    created_at: str,
    files: Sequence[FileEntry] | None,
    theirs: Commit,
    part: Manifest | None,
    save_id: str | None = None,
    names_attempt: bool = True,
    epoch: int | None = None,
) -> AlreadyCommitted | KeepExisting | Replace:
    """Return the decision about an existing commit of the local checkpoint's step.

    Args:
        attempt: Attempt of the local checkpoint; empty: unknown, an earlier pod left it.
        created_at: When the local checkpoint was finished, RFC 3339.
        files: Its files with checksums; ``None``: paths or sizes already differ from the commit's.
        theirs: The existing commit.
        part: The commit's manifest for this node; ``None``: it has none.
        save_id: Save id of the local checkpoint.
        names_attempt: Whether the local marker names its attempt. Otherwise each pod reads the marker as another attempt, and
            an equal time shows that it is the same marker.
        epoch: Epoch of the prefix under which the local checkpoint was written; ``None``: unknown.

    The commit of a lower epoch is an earlier pod's. Otherwise the later attempt wins, if both ids hold their start times; else
    the content that was finished later. A higher epoch decides nothing: the lease, asked before a commit is revoked, knows
    whether a later pod holds the prefix; if none does, the commit was copied from another prefix, or the claims were deleted.
    A commit is revoked only for a strictly later checkpoint. An old marker finished nothing new, so a directory that differs
    from its commit under the same marker is torn.
    """
    is_equal = part is not None and files is not None and _content(files) == _content(part.files)
    is_whole = len(theirs.manifests) == 1
    """Whether this node's part is the whole checkpoint; otherwise another node's part may differ and revoke the commit."""
    if is_equal and (is_whole or (attempt, save_id) == (theirs.attempt, theirs.save_id)):
        return AlreadyCommitted()
    if part is not None and not is_equal and not names_attempt and _same_instant(created_at, part.created_at):
        return KeepExisting(TORN, torn=True)
    if attempt == theirs.attempt:
        return _of_one_attempt(created_at, theirs, part, save_id, is_equal=is_equal)
    is_of_later_pod = epoch is not None and theirs.epoch is not None and epoch > theirs.epoch
    if not is_of_later_pod and not goes_after(attempt, created_at, theirs.attempt, theirs.created_at):
        return AlreadyCommitted() if is_equal else KeepExisting(f"attempt {theirs.attempt} is the later one of this step")
    return Replace()


def _of_one_attempt(
    created_at: str, theirs: Commit, part: Manifest | None, save_id: str | None, *, is_equal: bool
) -> KeepExisting | Replace:
    if part is None:
        return Replace()
    is_same_instant = _same_instant(created_at, part.created_at)
    is_other_save = save_id is not None and part.save_id is not None and save_id != part.save_id
    if not is_equal and is_same_instant and not is_other_save:
        return KeepExisting(TORN, torn=True)
    # Both times are from this node's clock. Within one second, the save on the volume is the later one.
    is_earlier = part.created_at is not None and not is_same_instant and not is_later(created_at, part.created_at)
    if save_id != theirs.save_id and is_earlier:
        return KeepExisting("a later save of this step is committed")
    return Replace()


def _content(files: Sequence[FileEntry]) -> set[tuple[str, int, str]]:
    return {(file.path, file.size_bytes, file.crc64nvme) for file in files}


def _same_instant(one: str, other: str | None) -> bool:
    return other is not None and (one == other or (seconds(one) is not None and seconds(one) == seconds(other)))
