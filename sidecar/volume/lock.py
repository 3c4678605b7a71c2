"""Lock of the volume, one sidecar at a time: the next pod may mount a persistent volume while the last one still flushes.

The lock is on the volume, not in the sidecar's state directory: the two that must not meet share nothing else. A trainer that
holds it keeps its own sidecar from starting, and one that removes it lets a second one in; it has no other power by it.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os

import structlog

from sidecar.tasks import within
from sidecar.volume.descriptors import closed_on_error
from sidecar.volume.opener import NotRegular, Place
from trainer_hook.contract import LOCK

log = structlog.get_logger()

RETRY_S = 0.25
"""Interval of tries to lock a volume in use, in seconds."""
_CANNOT_LOCK = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})


async def hold_volume(lock: Place, *, told_to_end: asyncio.Event) -> bool:
    """Wait until no other sidecar uses the volume, then hold its lock until this process ends.

    Returns:
        False if ``told_to_end`` was set while another one used it; the lock is not held then.

    Raises:
        OSError: The lock cannot be opened.
    """
    is_logged = False
    while try_to_hold(lock) is None:
        if not is_logged:
            log.warning(
                "volume_in_use", lock=LOCK, hint="another sidecar still flushes; this one starts when that one has ended"
            )
            is_logged = True
        if await within(RETRY_S, told_to_end.wait()):
            return False
    return True


def try_to_hold(lock: Place) -> int | None:
    """Try to take the lock. The kernel releases it when this process ends.

    Returns:
        The descriptor that holds it, which may be closed to release it; ``None``: another process holds it.

    Raises:
        OSError: The lock cannot be opened or taken.
    """
    try:
        fd = lock.open_file(os.O_RDWR | os.O_CREAT, 0o660)
    except (NotRegular, OSError) as error:
        if not isinstance(error, NotRegular) and error.errno != errno.ELOOP:
            raise
        log.warning("volume_lock_replaced", lock=LOCK, error=str(error), hint="it must be a regular file: made anew")
        lock.discard()
        fd = lock.open_file(os.O_RDWR | os.O_CREAT, 0o660)
    # An open descriptor of a failed try could hold the lock, if the server has taken it: against the next try, too.
    with closed_on_error(fd):
        is_taken = _is_taken(fd)
    if is_taken:
        return fd
    os.close(fd)
    return None


def is_held(lock: Place) -> bool:
    """Whether a sidecar holds the lock. False also if that cannot be found out.

    It is taken for an instant: a sidecar that is refused by that tries again.
    """
    try:
        fd = lock.open_file(os.O_RDONLY)
    except (NotRegular, OSError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    else:
        return False
    finally:
        os.close(fd)


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
