"""Volumes that can be full, hang, or become read-only, and a wall clock that can be turned."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

SMALL_MIB, DISK_MIB = 160, 320
NO_INOTIFY = ("unshare", "-U", "-r", "sh", "-c", 'echo 0 > /proc/sys/user/max_inotify_instances; exec "$@"', "sh")
"""Before a command: it gets no inotify instance."""


def _runs(*command: str) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL).returncode == 0


def _can_mount(kind: str) -> bool:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(mounted(Path(stack.enter_context(tempfile.TemporaryDirectory())), kind, mib=16))
        except subprocess.CalledProcessError:
            return False
    return True


@functools.cache
def why_no_disk() -> str | None:
    """Return why there is no file system on a file here."""
    if os.geteuid() != 0:
        return "a file system of its own needs root"
    if not all(map(shutil.which, ("mkfs.ext4", "fsfreeze", "mount"))):
        return "mkfs.ext4 or fsfreeze is not installed"
    return None if _can_mount("disk") else "a file cannot be mounted here"


@functools.cache
def why_no_tmpfs() -> str | None:
    if os.geteuid() != 0:
        return "a small tmpfs needs root"
    return None if _can_mount("small") else "a tmpfs cannot be mounted here"


@functools.cache
def why_no_user_limits() -> str | None:
    is_there = _runs(*NO_INOTIFY, "true")
    return None if is_there else "a process cannot get a user namespace of its own here"


@functools.cache
def clock_library() -> Path | None:
    """Return a library that turns the wall clock of a process; ``None``: it cannot be built here."""
    if shutil.which("gcc") is None:
        return None
    library = Path(tempfile.mkdtemp(prefix="campaign-clock-")) / "clock.so"
    source = Path(__file__).parent / "clock.c"
    return library if _runs("gcc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl") else None


def why_not(act: str) -> str | None:
    """Return why an act cannot be played on this machine; ``None``: it can."""
    reasons: dict[str, Callable[[], str | None]] = {
        "clock jumps": lambda: None if clock_library() else "gcc, which builds the clock, is not installed",
        "volume full": why_no_tmpfs,
        "volume hangs": why_no_disk,
        "volume read-only": why_no_disk,
        "no inotify": why_no_user_limits,
    }
    return reasons[act]() if act in reasons else None


@contextlib.contextmanager
def mounted(folder: Path, kind: str, *, mib: int = 0) -> Iterator[Path]:
    """Mount a volume of its own below a folder. ``small``: in memory; ``disk``: an ext4 file system on a file."""
    volume = folder / "volume"
    volume.mkdir(exist_ok=True)
    if kind == "plain":
        yield volume
        return
    if kind == "small":
        command = ["mount", "-t", "tmpfs", "-o", f"size={mib or SMALL_MIB}m", "tmpfs", str(volume)]
    else:
        image = folder / "volume.img"
        with image.open("wb") as file:
            file.truncate((mib or DISK_MIB) << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True, capture_output=True)
        command = ["mount", "-o", "loop,errors=remount-ro", str(image), str(volume)]
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield volume
    finally:
        subprocess.run(["umount", "-l", str(volume)], check=False, capture_output=True)
        (folder / "volume.img").unlink(missing_ok=True)


@contextlib.contextmanager
def full(volume: Path) -> Iterator[None]:
    """Take all space that is left."""
    filler = volume / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 20))
    try:
        yield
    finally:
        filler.unlink()


@contextlib.contextmanager
def frozen(volume: Path) -> Iterator[None]:
    """Let every write hang."""
    subprocess.run(["fsfreeze", "-f", str(volume)], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "-u", str(volume)], check=True, capture_output=True)


def becomes_read_only(volume: Path) -> None:
    """Do what an error of its disk does to a file system, also with open files: for good."""
    subprocess.run(["mount", "-o", "remount,abort", str(volume)], check=True, capture_output=True)


class Clock:
    """The wall clock of processes that are started with ``within``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.turn(0.0)

    def turn(self, offset_s: float) -> None:
        """Set it to that many seconds after the machine's."""
        with self._path.open("r+b" if self._path.exists() else "wb") as file:
            file.write(struct.pack("d", offset_s))

    @property
    def within(self) -> list[str]:
        return ["env", f"LD_PRELOAD={clock_library()}", f"CAMPAIGN_CLOCK={self._path}"]
