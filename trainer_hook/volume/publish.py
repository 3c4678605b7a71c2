"""Atomic publication of files, and the marker that completes a checkpoint."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer_hook import contract

_PROBE = ".probe"


def publish(path: Path, content: bytes, *, durable: bool = False, group: int | None = None, not_before_ns: int = 0) -> None:
    """Write a file by temp file and rename.

    ``durable``: also fsync file and directory; data files need no fsync, because the sidecar reads through the same page cache.
    ``group``: if it is the file's group, it may write to the file. ``not_before_ns``: lower bound of the modification time, in
    epoch nanoseconds.

    Raises ``OSError``: the file is as before.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns():x}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o664)
        with os.fdopen(fd, "wb") as file:
            if (status := os.fstat(fd)).st_gid == group:
                os.fchmod(fd, status.st_mode | stat.S_IWGRP)
            file.write(content)
            file.flush()
            if os.fstat(fd).st_mtime_ns < not_before_ns:
                with contextlib.suppress(OSError):  # a file system that cannot set times
                    os.utime(fd, ns=(not_before_ns, not_before_ns))
            if durable:
                os.fsync(fd)
        temporary.replace(path)
    except BaseException:  # SystemExit of a signal, too: the file would count as one of the checkpoint's
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def listed_files(folder: Path) -> tuple[contract.ListedFile, ...]:
    """Return the regular files of a checkpoint except its marker, sorted by path."""
    return tuple(sorted(_files(folder, folder), key=lambda file: file.path))


def _files(folder: Path, root: Path) -> Iterator[contract.ListedFile]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path), root)
            elif entry.is_file(follow_symlinks=False) and entry.path != str(root / contract.MARKER):
                path = Path(entry.path).relative_to(root).as_posix()
                yield contract.ListedFile(contract.check_path(path), entry.stat(follow_symlinks=False).st_size)


def make_system_folders(volume: Path) -> None:
    """Create the folders that both containers write to, writable for a sidecar of another user in this group.

    Raises ``OSError``: the volume is not writable, or not there.
    """
    for path, mode in ((contract.SYSTEM_DIR, 0o2775), (contract.LEASES, 0o2777)):
        (volume / path).mkdir(exist_ok=True)  # never the volume itself: that would hide a missing mount
        _add_mode(volume / path, mode)


def open_to_group(folder: Path) -> None:
    """Let the sidecar's user read the files: some libraries write them for their owner only (safetensors: 0600).

    For a sidecar of another user in a common group, the group may write, too. It needs write access to a file for a hard link
    (``fs.protected_hardlinks``), and to the folder for deletion.
    """
    group = _sidecar_group(folder.parent)
    for place, _, names in os.walk(folder):
        _add_mode(Path(place), 0o755, group=group)
        for name in names:
            _add_mode(Path(place, name), 0o644, group=group)


def _sidecar_group(volume: Path) -> int | None:
    try:
        token = (volume / contract.TOKEN).lstat()
    except OSError:
        return None
    return None if token.st_uid == os.geteuid() else token.st_gid


def _add_mode(path: Path, mode: int, *, group: int | None = None) -> None:
    try:
        status = path.lstat()
        there = status.st_mode & 0o7777
        if status.st_gid == group:
            mode |= stat.S_IWGRP
        if there | mode != there and not path.is_symlink():
            path.chmod(there | mode)
    except OSError:
        return


def finish(folder: Path, marker: contract.Marker) -> None:
    """Write the marker, which makes the checkpoint finished.

    A file newer than the marker counts as changed afterwards. So the marker is never older than the files, even if the clock
    was set back, or if files were copied with their times.

    Raises ``OSError``: the volume is full or not writable.
    """
    open_to_group(folder)
    newest_ns = 0
    for file in marker.files or ():
        with contextlib.suppress(OSError):  # missing: the sidecar will reject the checkpoint and name the file
            newest_ns = max(newest_ns, (folder / file.path).stat().st_mtime_ns)
    group = _sidecar_group(folder.parent)
    publish(folder / contract.MARKER, contract.encode_marker(marker), durable=True, group=group, not_before_ns=newest_ns)


def remove(folder: Path) -> None:
    """Delete a checkpoint, its marker first: the rest must not count as finished."""
    (folder / contract.MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def check_writable(folder: Path) -> None:
    """Make the folder of a checkpoint, write a file there, and delete both.

    Raises ``OSError``: the volume is full, read-only or gone.
    """
    try:
        folder.mkdir(exist_ok=True)
        (folder / _PROBE).write_bytes(b"\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def empty(folder: Path) -> None:
    """Delete the files of a checkpoint, its marker first, whose folder is written anew at once."""
    (folder / contract.MARKER).unlink(missing_ok=True)
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            Path(entry.path).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Local:
    """A finished checkpoint on the volume."""

    name: str
    marker: contract.Marker


def finished_on(volume: Path) -> list[Local]:
    """Return the checkpoints on a volume whose marker is valid and whose listed files are there with their sizes."""
    found = []
    try:
        names = [entry.name for entry in os.scandir(volume) if contract.is_checkpoint_name(entry.name)]
    except OSError:
        return []
    for name in names:
        try:
            marker = contract.parse_marker((volume / name / contract.MARKER).read_bytes(), name=name)
            if all((volume / name / f.path).stat().st_size == f.size_bytes for f in marker.files or ()):
                found.append(Local(name, marker))
        except (OSError, contract.ContractError):
            continue
    return found
