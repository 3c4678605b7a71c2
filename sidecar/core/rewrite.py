"""What becomes of a finished checkpoint whose step is committed already: it is the same, it replaces that, or it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sidecar.core.manifest import Commit, FileEntry, Manifest
from trainer_hook.contract import ContractError, epoch_seconds


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
    *, attempt: str, created_at: str, files: Sequence[FileEntry] | None, theirs: Commit, part: Manifest | None
) -> Same | Keep | Replace:
    """Return what to do about a commit of the same step.

    Args:
        attempt: Ours.
        created_at: When ours was finished, RFC 3339.
        files: Ours with their checksums; ``None`` if paths or sizes alone tell that they are others.
        theirs: The commit.
        part: Its manifest for this node, if it has one.

    A commit is taken back only for content that is strictly later: a marker that was not written anew has finished nothing
    new, so a directory that differs from what was committed under it is a torn one.
    """
    if part is not None and files is not None and _content(files) == _content(part.files):
        return Same()
    if attempt == theirs.attempt:
        if part is not None and _same_instant(created_at, part.created_at):
            return Keep("its files changed after its marker was written: the store keeps what was committed", torn=True)
        return Replace()
    if theirs.created_at is not None and not _is_later(created_at, theirs.created_at):
        return Keep(f"attempt {theirs.attempt} wrote this step later")
    return Replace()


def _content(files: Sequence[FileEntry]) -> set[tuple[str, int, str]]:
    return {(file.path, file.size_bytes, file.crc64nvme) for file in files}


def _seconds(stamp: str) -> float | None:
    try:
        return epoch_seconds(stamp)
    except ContractError:
        return None


def _same_instant(one: str, other: str | None) -> bool:
    return other is not None and (one == other or (_seconds(one) is not None and _seconds(one) == _seconds(other)))


def _is_later(ours: str, theirs: str) -> bool:
    our_s, their_s = _seconds(ours), _seconds(theirs)
    return our_s is None or their_s is None or our_s > their_s
