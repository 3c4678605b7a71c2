"""Descriptors of calls that fail after an open: a volume that fails for hours must not use up what the process may open."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidecar.upload.send.journal import Journal
from sidecar.volume.lock import try_to_hold
from sidecar.volume.sockets import connect_unix, listen_unix
from sidecar.volume.volume import Volume

LOCK, FILE, SOCKET = ".ckpt/lock", ".ckpt/file", ".ckpt/socket"


def append_to_journal(volume: Volume) -> None:
    journal = Journal(volume / FILE)
    try:
        journal._open()
    finally:
        journal.close()


def fails(*_: Any) -> Any:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


@pytest.mark.parametrize(
    ("module", "function", "call"),
    [
        (fcntl, "flock", lambda volume: try_to_hold(volume / LOCK)),
        (os, "fstat", lambda volume: (volume / FILE).open_file()),
        (os, "fchmod", lambda volume: (volume / FILE).create()),
        (os, "fstat", lambda volume: volume.free_bytes()),
        (os, "fstat", append_to_journal),
        (os, "fstat", lambda volume: connect_unix(volume / SOCKET, timeout_s=1)),
    ],
    ids=["lock", "open", "create", "refresh", "journal", "socket"],
)
def test_a_call_that_fails_after_its_open_leaves_nothing_open(
    module: Any, function: str, call: Callable[[Volume], object], volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    (volume / FILE).publish(b"")
    listen_unix(volume / SOCKET).close()
    volume.free_bytes()  # what stays open is open from here on
    before = sorted(Path("/proc/self/fd").iterdir())
    with monkeypatch.context() as failing:
        failing.setattr(module, function, fails)
        with pytest.raises(OSError, match="Stale"):
            call(volume)
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_a_lock_that_a_failed_try_may_have_taken_is_free_for_the_next_try(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer of a file server was lost: the sidecar waited for itself until the end."""
    real = fcntl.flock

    def answer_is_lost(fd: int, operation: int) -> None:
        real(fd, operation)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as failing:
        failing.setattr(fcntl, "flock", answer_is_lost)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            try_to_hold(volume / LOCK)
    held = try_to_hold(volume / LOCK)
    assert held is not None
    os.close(held)
