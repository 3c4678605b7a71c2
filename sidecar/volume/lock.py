"""One sidecar per volume: a lasting one may be mounted by the next pod while the last one still flushes."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from pathlib import Path

import structlog

from trainer_hook.contract import SYSTEM_DIR

log = structlog.get_logger()

LOCK = f"{SYSTEM_DIR}/lock"
AGAIN_S = 0.25
"""How often a volume that is in use is tried again."""
_CANNOT_LOCK = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})


async def hold_volume(root: Path, *, told_to_end: asyncio.Event) -> bool:
    """Wait until no other sidecar uses the volume, and hold it until this process ends.

    Returns:
        False if ``told_to_end`` was set first; nothing on the volume is ours then.

    Raises:
        OSError: The lock cannot be opened.
    """
    fd = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o660)
    is_said = False
    while not _is_taken(fd):
        if not is_said:
            log.warning(
                "volume_in_use", lock=LOCK, hint="another sidecar still flushes; this one starts when that one has ended"
            )
            is_said = True
        try:
            async with asyncio.timeout(AGAIN_S):
                await told_to_end.wait()
        except TimeoutError:
            continue
        os.close(fd)
        return False
    # fd stays open on purpose: the kernel gives the lock back however this process ends.
    return not told_to_end.is_set()


def _is_taken(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _CANNOT_LOCK:
            raise
        log.warning("volume_not_locked", error=error.strerror, hint="make sure that one sidecar at a time uses the volume")
    return True
