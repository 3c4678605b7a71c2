"""Translation of ``OSError`` of a folder store into ``StoreError``."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from sidecar.errors import AccessRefused, ImpossibleKey, NotFound, StoreError, StoreFull, StoreUnavailable, TooLarge

HAS_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""Errors of ``link`` on file systems without hard links."""
_TEMPORARY = re.compile(r"[/]tmp-[0-9a-f]{32}\Z")
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_IN_THE_WAY = frozenset({errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY})
_NEXT_STEP = {
    errno.ENOSPC: "free space or inodes on the file system of CKPT_STORE, make it larger, or set CKPT_KEEP_STORE",
    errno.EDQUOT: "raise the quota of the file system of CKPT_STORE, or set CKPT_KEEP_STORE",
    errno.EACCES: "make the folder of CKPT_STORE readable and writable for the sidecar's user or group (fsGroup)",
    errno.EPERM: "make the folder of CKPT_STORE readable and writable for the sidecar's user or group (fsGroup)",
    errno.EROFS: "mount the volume of CKPT_STORE writable",
    errno.ELOOP: "the store follows no symbolic links: replace it by what it points to",
    errno.ESTALE: "the file server was restarted or the folder replaced; it is tried again",
}


@contextmanager
def translated(name: str) -> Iterator[None]:
    """Translate ``OSError`` of a read into ``StoreError``; a missing file is ``NotFound``, as is one whose name is too long."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise NotFound(name) from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise NotFound(name) from None
        raise _meaning(name, error) from error


@contextmanager
def writing(name: str) -> Iterator[None]:
    """Translate ``OSError`` of a write into ``StoreError``, never into ``NotFound``."""
    try:
        yield
    except OSError as error:
        raise _meaning(name, error) from error


@contextmanager
def suppress_unsupported() -> Iterator[None]:
    """Ignore operations that the file system does not support: some network file systems cannot fsync a folder."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise


def _meaning(name: str, error: OSError) -> StoreError:
    number = error.errno or 0
    # Without the random name of a temporary file, so that the same error is the same line at each try.
    place = f" ({_TEMPORARY.sub('', os.fsdecode(error.filename))})" if error.filename else ""
    text = f"{name}: {error.strerror or error}{place}"
    if number in _IN_THE_WAY:
        return AccessRefused(f"{text}: one path cannot be both a folder and an object: remove one of them")
    if number == errno.ENAMETOOLONG:
        return ImpossibleKey(name, text.removeprefix(f"{name}: "))
    if number == errno.EFBIG:
        return TooLarge(name, "the file system of CKPT_STORE takes no file of that size")
    kind = AccessRefused if number in _REFUSED else StoreFull if number in _FULL else StoreUnavailable
    return kind(f"{text}: {_NEXT_STEP.get(number, 'it is tried again')}")
