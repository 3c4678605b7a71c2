"""Files are published atomically."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from trainer_hook.contract import LEASES, SYSTEM_DIR
from trainer_hook.volume import publish as publishing
from trainer_hook.volume.publish import is_there, make_system_folders, publish


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("durable", [False, True])
def test_a_published_file_replaces_the_older_one_and_leaves_nothing_else(durable: bool, volume: Path) -> None:
    publish(volume / "file", b"one", durable=durable)
    publish(volume / "file", b"two", durable=durable)
    assert (volume / "file").read_bytes() == b"two"
    assert names(volume) == ["file"]


def test_a_signal_that_ends_the_process_leaves_no_temporary_file(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(fd: int) -> None:
        raise SystemExit(143)

    publish(volume / "file", b"one")
    monkeypatch.setattr(os, "fsync", end)
    with pytest.raises(SystemExit):
        publish(volume / "file", b"two", durable=True)
    assert names(volume) == ["file"]
    assert (volume / "file").read_bytes() == b"one"


def test_readers_see_the_old_or_the_new_content_whole(volume: Path) -> None:
    contents = [bytes([number]) * 100_000 for number in range(2)]
    publish(volume / "file", contents[0])
    writing = threading.Event()

    def write() -> None:
        for number in range(200):
            publish(volume / "file", contents[number % 2])
        writing.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not writing.is_set():
        assert (volume / "file").read_bytes() in contents
    writer.join()


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_what_fails_leaves_the_older_file_and_no_litter(failing: str, volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(volume / "file", b"old")

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    if failing == "write":
        opened = os.fdopen

        def fdopen(fd: int, mode: str) -> Any:
            file = opened(fd, mode, buffering=0)
            os.dup2(os.open("/dev/full", os.O_WRONLY), fd)
            return file

        monkeypatch.setattr(publishing.os, "fdopen", fdopen)
    elif failing == "fsync":
        monkeypatch.setattr(publishing.os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        publish(volume / "file", b"new", durable=True)
    assert names(volume) == ["file"]
    assert (volume / "file").read_bytes() == b"old"


def test_the_folder_of_this_system_is_open_to_its_group_whoever_makes_it(volume: Path) -> None:
    before = os.umask(0o077)
    try:
        make_system_folders(volume)
    finally:
        os.umask(before)
    assert (volume / SYSTEM_DIR).stat().st_mode & 0o2775 == 0o2775
    assert (volume / LEASES).stat().st_mode & 0o2777 == 0o2777


@pytest.mark.parametrize(
    ("number", "there"), [(errno.ENOENT, False), (errno.ENOTDIR, False), (errno.EIO, True), (errno.ESTALE, True)]
)
def test_an_error_that_may_pass_is_no_missing_volume(
    number: int, there: bool, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training ended at its start, or trained without the hook, while the other ranks waited for it."""

    def failing(path: Any, **_: Any) -> Any:
        raise OSError(number, os.strerror(number), path)

    assert is_there(volume)
    assert not is_there(volume / "unmounted")
    monkeypatch.setattr(Path, "stat", failing)
    assert is_there(volume) is there
