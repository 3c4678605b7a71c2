"""What becomes of a finished checkpoint whose step is committed already: it is the same, it replaces that, or it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sidecar.core.attempts import goes_after, is_later, seconds
from sidecar.core.manifest import Commit, FileEntry, Manifest


@dataclass(frozen=True, slots=True)
class Same:
    """The store holds exactly this content: it is durable."""


@dataclass(frozen=True, slots=True)
class Keep:
    """What is committed stays."""

    reason: str
    torn: bool = False
    """The local directory is not what its marker once finished."""


@dataclass(frozen=True, slots=True)
class Replace:
    """The local checkpoint is the later one and takes its place."""


def rewrite(
    *,
    attempt: str,
    created_at: str,
    files: Sequence[FileEntry] | None,
    theirs: Commit,
    part: Manifest | None,
    save_id: str | None = None,
) -> Same | Keep | Replace:
    """Return what to do about a commit of the same step.

    Args:
        attempt: Ours.
        created_at: When ours was finished, RFC 3339.
        files: Ours with their checksums; ``None`` if paths or sizes alone tell that they are others.
        theirs: The commit.
        part: Its manifest for this node, if it has one.
        save_id: Of ours.

    Of two attempts the one that began later goes first, where their ids say so, else the content that was finished later.
    A commit is taken back only for what is strictly later: a marker that was not written anew has finished nothing
    new, so a directory that differs from what was committed under it is a torn one.
    """
    is_equal = part is not None and files is not None and _content(files) == _content(part.files)
    is_whole = len(theirs.manifests) == 1
    """Whether this node's part is all there is: of several, another one's part may differ and take the commit back."""
    if is_equal and (is_whole or (attempt, save_id) == (theirs.attempt, theirs.save_id)):
        return Same()
    if attempt == theirs.attempt:
        return _of_one_attempt(created_at, theirs, part, save_id, is_equal=is_equal)
    if not goes_after(attempt, created_at, theirs.attempt, theirs.created_at):
        return Same() if is_equal else Keep(f"attempt {theirs.attempt} is the later one of this step")
    return Replace()


def _of_one_attempt(
    created_at: str, theirs: Commit, part: Manifest | None, save_id: str | None, *, is_equal: bool
) -> Keep | Replace:
    if part is None:
        return Replace()
    if not is_equal and _same_instant(created_at, part.created_at):
        return Keep("its files changed after its marker was written: the store keeps what was committed", torn=True)
    # Both times are of this node's own clock.
    if save_id != theirs.save_id and part.created_at is not None and not is_later(created_at, part.created_at):
        return Keep("a later save of this step is committed")
    return Replace()


def _content(files: Sequence[FileEntry]) -> set[tuple[str, int, str]]:
    return {(file.path, file.size_bytes, file.crc64nvme) for file in files}


def _same_instant(one: str, other: str | None) -> bool:
    return other is not None and (one == other or (seconds(one) is not None and seconds(one) == seconds(other)))
