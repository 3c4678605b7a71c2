"""Folder of a checkpoint on the shared volume: its files, the marker that finishes it, deletion; and all finished ones."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer_hook import contract
from trainer_hook.volume.publish import add_mode, publish
from trainer_hook.volume.retry import retried

_PROBE = ".probe"
_OPEN_ON_NFS = ".nfs"
"""Names of deleted files that a process of the same client has open; they go when it closes them."""


def listed_files(folder: Path) -> tuple[contract.ListedFile, ...]:
    """Return the regular files of a checkpoint except its marker, sorted by path."""
    return tuple(sorted(retried(lambda: list(_files(folder, folder))), key=lambda file: file.path))


def _files(folder: Path, root: Path) -> Iterator[contract.ListedFile]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path), root)
            elif entry.is_file(follow_symlinks=False) and entry.path != str(root / contract.MARKER):
                path = Path(entry.path).relative_to(root).as_posix()
                yield contract.ListedFile(contract.check_path(path), entry.stat(follow_symlinks=False).st_size)


def open_to_group(folder: Path) -> None:
    """Let the sidecar's user read the files: some libraries write them for their owner only (safetensors: 0600).

    For a sidecar of another user in a common group, the group may write, too. It needs write access to a file for a hard link
    (``fs.protected_hardlinks``), and to the folder for deletion.
    """
    group = _sidecar_group(folder.parent)
    for place, _, names in os.walk(folder):
        add_mode(Path(place), 0o755, group=group)
        for name in names:
            add_mode(Path(place, name), 0o644, group=group)


def _sidecar_group(volume: Path) -> int | None:
    try:
        token = (volume / contract.TOKEN).lstat()
    except OSError:
        return None
    return None if token.st_uid == os.geteuid() else token.st_gid


def finish(folder: Path, marker: contract.Marker) -> None:
    """Write the marker, which makes the checkpoint finished.

    A file newer than the marker counts as changed afterwards. So the marker is never older than the files, even if the clock
    was set back, or if files were copied with their times.

    Raises:
        ContractError: It has no file, though every checkpoint has some on the first node.
        OSError: The volume is full or not writable.
    """
    if marker.files == () and (marker.node is None or marker.node.index == 0):
        raise contract.ContractError(f"{folder.name} is empty")
    open_to_group(folder)
    newest_ns = 0
    for file in marker.files or ():
        with contextlib.suppress(OSError):  # missing: the sidecar will reject the checkpoint and name the file
            newest_ns = max(newest_ns, (folder / file.path).stat().st_mtime_ns)
    group = _sidecar_group(folder.parent)
    write = functools.partial(publish, durable=True, group=group, not_before_ns=newest_ns)
    retried(functools.partial(write, folder / contract.MARKER, contract.encode_marker(marker)))


def remove(folder: Path) -> None:
    """Delete a checkpoint, its marker first: the rest must not count as finished."""
    (folder / contract.MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def remove_wholly(folder: Path) -> None:
    """Delete a checkpoint whose folder is written anew; again after an error that may pass.

    Raises ``OSError``: a file is left, and would be one of the new checkpoint's.
    """
    retried(functools.partial(_remove_wholly, folder))


def _remove_wholly(folder: Path) -> None:
    remove(folder)

    def failed(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for place, _, names in os.walk(folder, onerror=failed):
        if left := [name for name in names if not name.startswith(_OPEN_ON_NFS)]:
            raise OSError(errno.ENOTEMPTY, "a file of an earlier save cannot be deleted", str(Path(place, left[0])))


def check_writable(folder: Path) -> None:
    """Make the folder of a checkpoint, write a file there, and delete both.

    Raises ``OSError``: the volume is full, read-only or gone, or files of an earlier save cannot be deleted.
    """
    try:
        folder.mkdir(exist_ok=True)
        (folder / _PROBE).write_bytes(b"\n")
        remove_wholly(folder)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def empty(folder: Path) -> None:
    """Delete the files of a checkpoint, its marker first, whose folder is written anew at once."""
    (folder / contract.MARKER).unlink(missing_ok=True)
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            Path(entry.path).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class LocalCheckpoint:
    """A finished checkpoint on the volume."""

    name: str
    marker: contract.Marker


def finished_on(volume: Path) -> list[LocalCheckpoint]:
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
                found.append(LocalCheckpoint(name, marker))
        except (OSError, contract.ContractError):
            continue
    return found
