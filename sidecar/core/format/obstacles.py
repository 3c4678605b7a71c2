"""Scope of a volume's error during a resume: one step, which is passed over, or all steps, which ends the resume."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterable
from unicodedata import normalize

MAX_NAME_BYTES = 255
"""Longest name of a single file or directory. Source: path_resolution(7), NAME_MAX."""

_OF_ONE_STEP = frozenset(
    {
        errno.ENAMETOOLONG,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EEXIST,
        errno.ENOTEMPTY,
        errno.EINVAL,
        errno.EILSEQ,
        errno.ELOOP,
        errno.EFBIG,
        errno.EXDEV,
    }
)
"""Errors caused by the names or sizes of a step's files: another step may be stored without them."""

_MAY_PASS = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.EAGAIN,
        errno.EINTR,
        errno.ENOMEM,
        errno.EMFILE,
        errno.ENFILE,
        errno.ETIMEDOUT,
        errno.EREMOTEIO,
        errno.ENOTCONN,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ECONNABORTED,
        errno.ECONNRESET,
    }
)
"""Errors of a file server that fails over, of a machine under pressure, and of a disk at a single read or write."""

RETRY_S = (1.0, 3.0, 10.0)
"""Seconds until the first, the second and the last retry after an error that may pass."""

_HINTS = {
    errno.ENOSPC: "free space on the volume or make it larger, then ask again",
    errno.EDQUOT: "the quota of the volume is used up: raise it or free space, then ask again",
    errno.EROFS: "the volume is mounted read-only: mount it writable; after an error of its disk, replace it",
    errno.EACCES: "this user may not write there: run both containers as one user or group, or set fsGroup",
    errno.EPERM: "this user may not write there: run both containers as one user or group, or set fsGroup",
    errno.EIO: "the volume's disk fails: look at the node's kernel log, and replace the volume",
    errno.ESTALE: "the volume's mount is stale: mount it again, or start the pod anew",
    errno.EMFILE: "too many open files: raise the limit of the sidecar's container",
    errno.ENFILE: "too many open files on the machine: look at what else runs there",
}
_OTHER_HINT = "look at the volume and its mount, then ask again"


def is_of_one_step(number: int | None) -> bool:
    """Whether an errno concerns the step being stored alone. ``None``: unknown errno."""
    return number in _OF_ONE_STEP


def may_pass(number: int | None) -> bool:
    """Whether an errno may be gone at the next try, without an act of a person. ``None``: unknown errno."""
    return number in _MAY_PASS


def retry_in_s(number: int | None, failed: int) -> float | None:
    """Return the seconds until the volume is tried again; ``None``: not again.

    Args:
        number: Errno of the last try; ``None``: unknown.
        failed: Number of tries that failed, the last one included.
    """
    return RETRY_S[failed - 1] if may_pass(number) and failed <= len(RETRY_S) else None


def hint(number: int | None) -> str:
    """Return the remedy for an errno that concerns every step. ``None``: unknown errno."""
    return _HINTS.get(number or 0, _OTHER_HINT)


def contradiction(paths: Iterable[str]) -> str | None:
    """Return why files of these paths cannot all be stored in one directory, or ``None``.

    Returns:
        A text that names a path that would be a file and a directory at once.
    """
    known = frozenset(paths)
    for path in sorted(known):
        parts = path.split("/")
        for end in range(1, len(parts)):
            if (parent := "/".join(parts[:end])) in known:
                return f"{parent[:200]!r} is a file and the directory of {path[:200]!r}"
    return None


def unstorable(paths: Iterable[str]) -> str | None:
    """Return why no Linux file system can store one of these paths, or ``None``."""
    for path in paths:
        longest = max(len(part.encode()) for part in path.split("/"))
        if longest > MAX_NAME_BYTES:
            return f"{path[:60]!r}… has a name of {longest} bytes, file systems take {MAX_NAME_BYTES}"
    return None


def same_but_for_case(paths: Iterable[str]) -> list[str]:
    """Return the paths that collide on a volume that ignores case, or the Unicode form of a letter with an accent."""
    ordered = list(paths)
    count = Counter(map(_folded, ordered))
    return [path for path in ordered if count[_folded(path)] > 1]


def _folded(path: str) -> str:
    """Return what file systems compare that ignore case and Unicode forms. Source: Unicode standard, D145."""
    return path if path.isascii() and path.islower() else normalize("NFD", normalize("NFD", path).casefold())
