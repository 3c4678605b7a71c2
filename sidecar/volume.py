"""The shared volume: walking it, holding files so that a rotation cannot take them, publishing files whole.

Every path below the volume is written by a container with fewer rights than ours, so nothing is followed: directories are
walked by descriptor, files are opened with ``O_NOFOLLOW`` and compared with the inode that the walk saw.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import struct
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from sidecar.core.local import Finished, FoundCheckpoint, FoundFile, FoundMarker
from sidecar.errors import CheckpointChanged, CheckpointRejected
from trainer_hook.contract import (
    INCOMING,
    JOURNAL,
    LEASES,
    MARKER,
    MAX_MARKER_BYTES,
    PINS,
    SYSTEM_DIR,
    is_checkpoint_name,
)

log = structlog.get_logger()

_KINDS = {
    stat.S_IFLNK: "symbolic link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFBLK: "device",
    stat.S_IFCHR: "device",
}
_FINAL = frozenset(
    {
        errno.ENOENT,
        errno.EACCES,
        errno.EPERM,
        errno.ELOOP,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENAMETOOLONG,
        errno.ENXIO,
        errno.ENODEV,
    }
)
"""Errors that are a property of the file, such as a link or a socket. Every other one, such as too many open files or a
stale handle, is trouble of a moment: it says nothing about the checkpoint, which is looked at again."""
_FLOCK = struct.Struct("hhqqi0q")
"""``struct flock`` of 64-bit Linux: type, whence, start, length, process."""
_CANNOT_LINK = frozenset({errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.EACCES, errno.ENOSPC, errno.EDQUOT})


def publish(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write a file whole or not at all: temp file beside it, fsync, rename, fsync of the directory.

    Raises:
        OSError: The volume is full or not writable; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(fd)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames in a directory survive a crash of the machine."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Disappeared(CheckpointRejected):
    """A finished checkpoint was deleted before its files could be held."""


class Pin:
    """The files of one finished checkpoint, held until they are durable.

    Held by hard links below ``.ckpt/pins``; where links cannot be made (another user's files, another mount), by nothing but
    the hope that the trainer keeps them: ``held`` is then false, and status says so.
    """

    def __init__(self, checkpoint: Finished, base: Path, *, held: bool) -> None:
        self.checkpoint = checkpoint
        self.base = base
        self.held = held
        self._expected = {file.path: file for file in checkpoint.files}

    @contextmanager
    def open(self, path: str) -> Iterator[int]:
        """Open a file for reading, as the same file that the walk saw.

        Raises:
            CheckpointChanged: It was rewritten or replaced since.
            CheckpointRejected: It is gone, not readable for this user, or a link.
            OSError: The volume is in trouble; the file may be sound.
        """
        place = self.base / path
        try:
            fd = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno not in _FINAL:
                raise
            raise CheckpointRejected(_cannot_read(self.checkpoint.name, path, error)) from error
        try:
            self._expect(fd, path)
            yield fd
            self._expect(fd, path)
        finally:
            os.close(fd)

    def _expect(self, fd: int, path: str) -> None:
        now, then = os.fstat(fd), self._expected[path]
        if (now.st_ino, now.st_size, now.st_mtime_ns) != (then.inode, then.size_bytes, then.mtime_ns):
            raise CheckpointChanged(f"{self.checkpoint.name}/{path}")

    def exists(self) -> bool:
        """Whether the files can still be found."""
        return self.base.is_dir()


class Volume:
    """One mount, ``$CKPT_DIR``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.incoming = root / INCOMING
        self.journal = root / JOURNAL
        self._pins = root / PINS

    def prepare(self) -> None:
        """Create what this system owns.

        Raises:
            OSError: The volume is not there or not writable.
        """
        for path in (self.root / SYSTEM_DIR, self._pins, self.incoming, self.journal, self.root / LEASES):
            path.mkdir(parents=True, exist_ok=True)
            # Trainer and sidecar may be different users of one group; who made the directory opens it to both.
            if path.stat().st_uid == os.geteuid():
                path.chmod(0o2775 if path.name != "ranks" else 0o2777)

    def names(self) -> list[str]:
        """Return the directories that have a checkpoint's name."""
        with os.scandir(self.root) as entries:
            return [e.name for e in entries if is_checkpoint_name(e.name) and e.is_dir(follow_symlinks=False)]

    def marker_signature(self, name: str) -> str | None:
        """Return what names the version of a checkpoint's marker, or ``None`` while none can be seen. One ``lstat``."""
        try:
            return self.look_at_marker(name)
        except OSError:
            return None

    def look_at_marker(self, name: str) -> str | None:
        """Return the same, ``None`` only where there is no marker.

        Raises:
            OSError: The volume is in trouble; the marker may be there.
        """
        try:
            return _signature(os.lstat(self.root / name / MARKER))
        except OSError as error:
            if error.errno not in _FINAL:
                raise
            return None

    def examine(self, name: str) -> FoundCheckpoint:
        """Read a checkpoint's marker and walk its files.

        Raises:
            CheckpointRejected: The marker cannot be read or is no regular file.
            FileNotFoundError: There is no marker, or the directory is just being deleted.
            OSError: The volume is in trouble; the checkpoint may be sound.
        """
        return _examine(self.root / name, name)

    def is_unchanged(self, checkpoint: Finished) -> bool:
        """Whether a checkpoint's directory still holds, under the same marker, exactly the files that were finished."""
        if self.marker_signature(checkpoint.name) != checkpoint.version:
            return False
        try:
            return all(self._is_same(checkpoint.name, file) for file in checkpoint.files)
        except OSError:
            return False

    def _is_same(self, name: str, then: FoundFile) -> bool:
        now = os.lstat(self.root / name / then.path)
        return (now.st_ino, now.st_size, now.st_mtime_ns) == (then.inode, then.size_bytes, then.mtime_ns)

    def pins(self) -> list[Path]:
        """Return the pins that an earlier life of the sidecar left; those that it did not finish are dropped."""
        with os.scandir(self._pins) as entries:
            found = sorted(Path(e.path) for e in entries if e.is_dir(follow_symlinks=False))
        for place in (unfinished := [p for p in found if not _is_pin(p)]):
            shutil.rmtree(place, ignore_errors=True)
        return [place for place in found if place not in unfinished]

    def examine_pin(self, place: Path) -> FoundCheckpoint:
        """Read what a pin holds.

        Raises:
            FileNotFoundError: Its marker is missing: it holds nothing.
            CheckpointRejected: It cannot be read by this user.
            OSError: The volume is in trouble; the pin may be sound.
        """
        return _examine(place, place.name.partition("@")[0])

    def drop_pin(self, place: Path) -> None:
        """Let go what a pin holds. It stops being a pin at once: a kill in the middle leaves nothing that looks whole."""
        going = place.with_name(f"{place.name}.{uuid.uuid4().hex[:8]}.tmp")
        with contextlib.suppress(OSError):
            place.rename(going)
        shutil.rmtree(going, ignore_errors=True)

    def holds_its_version(self, place: Path, found: FoundCheckpoint) -> bool:
        """Whether a pin's marker is still the one that it was made for.

        The marker in a pin is a link: ``echo {} > .complete`` rewrites it there, too, and the pin's other files are then
        those of the version before.
        """
        return place.name == _held_as(found.name, found.marker.signature)

    def drop_journal(self, pin: Path) -> None:
        """Forget what was sent of the version that a pin held."""
        (self.journal / f"{pin.name}.jsonl").unlink(missing_ok=True)

    def drop_stray_journals(self) -> None:
        """Forget what was sent of versions that are neither pinned nor on the volume any more."""
        for path in list(self.journal.glob("*@*.jsonl")):
            name = path.stem.partition("@")[0]
            current = self.look_at_marker(name) if is_checkpoint_name(name) else None
            if not (self._pins / path.stem).is_dir() and (current is None or path.stem != _held_as(name, current)):
                path.unlink(missing_ok=True)

    def pin(self, checkpoint: Finished) -> Pin:
        """Hold the files of a checkpoint. Doing it again returns the same pin.

        Raises:
            Disappeared: They are gone.
            OSError: The volume is in trouble.
        """
        place = self._pin_path(checkpoint)
        if place.is_dir():
            return Pin(checkpoint, place, held=True)
        building = place.with_name(f"{place.name}.tmp")
        source = self.root / checkpoint.name
        shutil.rmtree(building, ignore_errors=True)
        try:
            for path in [*(file.path for file in checkpoint.files), MARKER]:
                target = building / path
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(source / path, target, follow_symlinks=False)
            building.rename(place)
        except FileNotFoundError:
            shutil.rmtree(building, ignore_errors=True)
            raise Disappeared(f"{checkpoint.name}: its files disappeared before they could be held") from None
        except OSError as error:
            shutil.rmtree(building, ignore_errors=True)
            if error.errno not in _CANNOT_LINK:
                raise
            return Pin(checkpoint, source, held=False)
        return Pin(checkpoint, place, held=True)

    def is_held(self, checkpoint: Finished) -> bool:
        """Whether the files stay, also when the trainer deletes them."""
        return self._pin_path(checkpoint).is_dir()

    def unpin(self, checkpoint: Finished) -> None:
        """Let the files go."""
        self.drop_pin(self._pin_path(checkpoint))

    def _pin_path(self, checkpoint: Finished) -> Path:
        return self._pins / _held_as(checkpoint.name, checkpoint.version)

    def fingerprint(self, name: str) -> tuple[int, float, str | None] | None:
        """Return what changes when somebody writes to a checkpoint's directory; ``None`` while there is none."""
        try:
            inode = os.lstat(self.root / name).st_ino
        except OSError:
            return None
        return inode, _newest_mtime(self.root / name), self.marker_signature(name)

    def put_in_place(self, incoming: Path, name: str, *, replacing: tuple[int, float, str | None] | None) -> Path:
        """Rename a complete directory to its name on the volume.

        Args:
            incoming: The directory, below ``.ckpt/incoming``.
            name: Its name.
            replacing: The ``fingerprint`` of what may be replaced.

        Raises:
            CheckpointChanged: The trainer wrote to that name in the meantime; what it wrote stays.
        """
        target = self.root / name
        if self.fingerprint(name) != replacing:
            raise CheckpointChanged(name)
        if replacing is None:
            incoming.rename(target)
            return target
        # A directory is not replaced by a rename: the old one steps aside and is deleted afterwards.
        aside = self.incoming / f"replaced-{uuid.uuid4().hex[:8]}"
        target.rename(aside)
        incoming.rename(target)
        shutil.rmtree(aside, ignore_errors=True)
        return target

    def delete(self, name: str) -> None:
        """Delete a local checkpoint: its marker first, so that nobody takes the rest for a checkpoint."""
        (self.root / name / MARKER).unlink(missing_ok=True)
        shutil.rmtree(self.root / name, ignore_errors=True)

    def free_bytes(self) -> int:
        """Return what an unprivileged writer can still write."""
        space = os.statvfs(self.root)
        return space.f_bavail * space.f_frsize

    def total_bytes(self) -> int:
        """Return the size of the volume."""
        space = os.statvfs(self.root)
        return space.f_blocks * space.f_frsize

    def read_small(self, path: str) -> bytes | None:
        """Return a small file of the contract, or ``None`` if it is not there or cannot be read."""
        try:
            return _read_regular(self.root / path)
        except (OSError, CheckpointRejected):
            return None

    def held_leases(self) -> int:
        """Return how many training processes are alive: ranks whose lease another process holds."""
        try:
            with os.scandir(self.root / LEASES) as entries:
                leases = [e.path for e in entries if e.name.endswith(".lease") and e.is_file(follow_symlinks=False)]
        except OSError:
            return 0
        return sum(_is_held(lease) for lease in leases)

    def unfinished(self) -> dict[str, float]:
        """Return the checkpoints without a marker, and when each was last written to, in epoch seconds."""
        return {name: _newest_mtime(self.root / name) for name in self.names() if self.marker_signature(name) is None}


def version_id(version: str) -> str:
    """Return a short, file-name-safe id of a marker's version."""
    return hashlib.blake2b(version.encode(), digest_size=6).hexdigest()


def _held_as(name: str, version: str) -> str:
    return f"{name}@{version_id(version)}"


def _signature(status: os.stat_result) -> str:
    return f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"


def _examine(place: Path, name: str) -> FoundCheckpoint:
    content, status = _read_marker(place / MARKER)
    files: list[FoundFile] = []
    irregular: list[tuple[str, str]] = []
    for folder, _, file_names, folder_fd in os.fwalk(place, follow_symlinks=False, onerror=_raise):
        inside = Path(folder).relative_to(place).as_posix()
        for entry in [*file_names, *_linked_folders(folder_fd)]:
            path = entry if inside == "." else f"{inside}/{entry}"
            found = os.stat(entry, dir_fd=folder_fd, follow_symlinks=False)
            if stat.S_ISREG(found.st_mode):
                if path != MARKER:
                    files.append(FoundFile(path, found.st_size, found.st_mtime_ns, found.st_ino))
            elif not stat.S_ISDIR(found.st_mode):
                irregular.append((path, _KINDS.get(stat.S_IFMT(found.st_mode), "special file")))
    files.sort(key=lambda file: file.path)
    marker = FoundMarker(content, _signature(status), status.st_mtime_ns)
    return FoundCheckpoint(name, tuple(files), tuple(sorted(set(irregular))), marker)


def _linked_folders(folder_fd: int) -> list[str]:
    # fwalk lists a link to a directory among the directories and does not enter it.
    with os.scandir(folder_fd) as entries:
        return [e.name for e in entries if e.is_symlink() and e.is_dir()]


def _is_pin(place: Path) -> bool:
    return not place.name.endswith(".tmp") and is_checkpoint_name(place.name.partition("@")[0])


def _raise(error: OSError) -> None:
    if error.errno == errno.ENOENT or error.errno not in _FINAL:
        raise error
    raise CheckpointRejected(f"{error.filename}: {error.strerror}; run both containers as one user or group") from error


def _read_marker(path: Path) -> tuple[bytes, os.stat_result]:
    fd = _open_regular(path)
    try:
        return os.read(fd, MAX_MARKER_BYTES + 1), os.fstat(fd)
    finally:
        os.close(fd)


def _read_regular(path: Path) -> bytes:
    return _read_marker(path)[0]


def _open_regular(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENOENT or error.errno not in _FINAL:
            raise
        raise CheckpointRejected(f"{path.name}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointRejected(f"{path.name} is not a regular file")
    return fd


def _cannot_read(name: str, path: str, error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        return (
            f"{name}/{path}: not readable for user {os.geteuid()}; run both containers as one user, or make it group-readable"
        )
    return f"{name}/{path}: {error.strerror}"


def _is_held(lease: str) -> bool:
    try:
        fd = os.open(lease, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # Asked, not tried: a lock of ours, however short, would refuse a trainer that takes its lease at that instant.
        answer = fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError:
        return True
    else:
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
    finally:
        os.close(fd)


def _newest_mtime(place: Path) -> float:
    newest = 0.0
    for folder, _, file_names in os.walk(place):
        for path in [Path(folder), *(Path(folder, name) for name in file_names)]:
            try:
                newest = max(newest, os.lstat(path).st_mtime)
            except OSError:
                continue
    return newest
