"""What a trainer does that is broken, or wants the sidecar to send or to destroy what is not its own."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from tests.process.sidecar_process import Sidecar, write_checkpoint

SECRET = b"the secret of the sidecar " * 4096
_RENAME_EXCHANGE = 2
_libc = ctypes.CDLL(None, use_errno=True)


def exchange(one: Path, other: Path) -> None:
    """Let two names change places in one step, as renameat2(2) does."""
    _libc.renameat2(-100, bytes(one), -100, bytes(other), _RENAME_EXCHANGE)


@contextmanager
def repeating(*attacks: Callable[[], object]) -> Iterator[None]:
    """Repeat attacks all the time, each in a thread of its own. An attack on what is just gone is tried again."""
    ended = threading.Event()

    def run(attack: Callable[[], object]) -> None:
        while not ended.is_set():
            with suppress(OSError):
                attack()

    threads = [threading.Thread(target=run, args=(attack,)) for attack in attacks]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def exchanging(*pairs: tuple[Path, Path]) -> AbstractContextManager[None]:
    """Let the two names of each pair change places all the time."""
    return repeating(lambda: [exchange(one, other) for one, other in pairs])


def outside_of(tmp_path: Path) -> Path:
    """Make a folder that looks like a checkpoint, beside the volume: it stands for a mounted secret."""
    return write_checkpoint(tmp_path, "outside", {"model": SECRET, "deep/model": SECRET}, {})


def state_of(folder: Path) -> dict[str, tuple[int, int, int, int]]:
    """Return what shows that nothing in a folder was written to, deleted or linked."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        status = path.lstat()
        found[str(path)] = (status.st_mode, status.st_size, status.st_nlink, status.st_mtime_ns)
    return found


def stored_with(store: Path, beginning: bytes) -> list[str]:
    """Return the objects of a folder store, also those of unfinished writes, that begin with these bytes."""
    found = []
    for path in (Path(folder, name) for folder, _, names in os.walk(store) for name in names):  # folders may go meanwhile
        with suppress(OSError), path.open("rb") as file:
            if file.read(len(beginning)) == beginning:
                found.append(path.relative_to(store).as_posix())
    return found


def token_of(running: Sidecar) -> bytes:
    return (running.volume / ".ckpt/token").read_bytes()


def rewriting(path: Path, *contents: bytes) -> Callable[[], None]:
    """Return an attack that writes a file anew, by turns."""

    def attack() -> None:
        for content in contents:
            path.write_bytes(content)

    return attack


def growing_and_shrinking(path: Path, size_bytes: int) -> Callable[[], None]:
    def attack() -> None:
        for size in (0, size_bytes // 2, size_bytes, size_bytes * 2):
            os.truncate(path, size)

    return attack
