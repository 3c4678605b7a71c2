"""Second tries of calls to the volume: many errors of a network file system pass."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

RETRY_FOR_S = 1.0
PAUSE_S = 0.1
FULL = (errno.ENOSPC, errno.EDQUOT)
_LASTING = (*FULL, errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)


def retried(call: Callable[[], T]) -> T:
    """Return what a call to the volume returns. It must be repeatable, and is repeated after an error that may pass.

    Raises ``OSError``: one that lasts, or that of the last try, after ``RETRY_FOR_S``.
    """
    until_s = time.monotonic() + RETRY_FOR_S
    while True:
        is_last = time.monotonic() >= until_s
        try:
            return call()
        except OSError as error:
            if error.errno in _LASTING or is_last:
                raise
        time.sleep(PAUSE_S)
