"""The unix socket of the local API on the volume: bound, and connected to, without following a link.

System calls on sockets take whole paths. So they are given one that begins at a descriptor, below ``/proc/self/fd``; this also
makes it short enough, whatever the volume's path is.
"""

from __future__ import annotations

import errno
import os
import socket
import stat

from sidecar.volume.descriptors import closed_on_error, opened
from sidecar.volume.opener import Place

_BACKLOG = 64
_MODE = 0o660


def listen_unix(place: Place) -> socket.socket:
    """Return a listening socket; an existing file of its name is removed.

    Raises:
        OSError: The volume cannot hold sockets, or a directory or link is in the way.
    """
    place.remove()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with place.parent.listed() as folder:
            listening.bind(f"/proc/self/fd/{folder}/{place.name}")
        with opened(_socket_at(place)) as fd:
            os.chmod(f"/proc/self/fd/{fd}", _MODE)  # noqa: PTH101 - of the inode, which nobody can exchange
        listening.listen(_BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


def connect_unix(place: Place, *, timeout_s: float) -> socket.socket:
    """Return a socket connected to the one at ``place``.

    Raises:
        OSError: No process listens there, or it is not a socket.
    """
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.settimeout(timeout_s)
    try:
        with opened(_socket_at(place)) as fd:
            connected.connect(f"/proc/self/fd/{fd}")
    except BaseException:
        connected.close()
        raise
    return connected


def _socket_at(place: Place) -> int:
    fd = place.folder.open(place.inside, os.O_PATH)
    with closed_on_error(fd):
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK), str(place))
    return fd
