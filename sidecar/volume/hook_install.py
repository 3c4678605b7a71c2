"""Puts the trainer's side where a container without it finds it, by PYTHONPATH alone: ``install-hook``, ``CKPT_INSTALL_HOOK``.

``DIR/sitecustomize.py`` looks through the link ``DIR/trainer_hook-current`` at a folder that is named for its content and never
changes. So an interpreter that starts while another version is being installed sees the whole old or the whole new one,
and a process that runs keeps the one that it began with.
"""

from __future__ import annotations

import errno
import hashlib
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import trainer_hook
from sidecar.volume.descriptors import opened, set_mode, write_all
from sidecar.volume.files import FULL
from sidecar.volume.opener import Folder, Place
from trainer_hook import CURRENT, PACKAGE
from trainer_hook.contract import SYSTEM_DIR

_HASH_DIGITS = 12
_MOST_BYTES = 1 << 20


class NotInstalled(Exception):
    """The text names the path and says what to do."""

    is_full = False
    """Whether the volume is full."""


@dataclass(frozen=True, slots=True)
class Installed:
    """Where the hook lies now."""

    folder: Path
    """What goes onto ``PYTHONPATH``."""
    version: str
    """Name of the folder that holds the package."""
    is_new: bool
    """False: it was there already."""


def install(folder: Path, *, keeps_other: bool = False) -> Installed:
    """Copy the hook into a folder, all of it or nothing. Doing it again changes nothing.

    Every file can be read by every user: the trainer may run as another one.

    ``keeps_other``: another version that is there stays: that of a training that runs.

    Raises:
        NotInstalled: The folder cannot be written, or holds a ``sitecustomize.py`` of somebody else.
    """
    source = Path(trainer_hook.__file__).resolve().parent
    files = {path.relative_to(source).as_posix(): path.read_bytes() for path in sorted(source.rglob("*.py"))}
    starter = files["activation/inject/sitecustomize.py"]
    version = f"{PACKAGE}-{_digest(files)}"
    try:
        place = _place_of(folder)
        target = place / "sitecustomize.py"
        place.make_folder()
        there = _content(target)
        if keeps_other and there is not None and (other := _whole_version(place)) is not None:
            return Installed(folder, other, is_new=False)
        is_new = not (there == starter and _whole_version(place) == version)
        if is_new:
            if there is not None and PACKAGE.encode() not in there:
                raise NotInstalled(f"{target} is somebody else's: choose a folder of its own, such as {folder / 'hook'}")
            _place_package(place, version, files)
            _replace(place / CURRENT, lambda temporary: temporary.make_link(version))
            # Last on purpose: from now on interpreters look here.
            _replace(target, lambda temporary: _write(temporary, starter))
    except OSError as error:
        raise _not_installed(folder, error) from None
    return Installed(folder, version, is_new)


def install_with_room(folder: Path, *, keeps_other: bool) -> Installed:
    """Do as ``install``; on a full volume another version that is there stays.

    Raises:
        NotInstalled: As ``install``; the volume is full, and no version is there.
    """
    try:
        return install(folder, keeps_other=keeps_other)
    except NotInstalled as error:
        if not error.is_full:
            raise
    return install(folder, keeps_other=True)


def _not_installed(folder: Path, error: OSError) -> NotInstalled:
    is_in_the_way = error.errno in (errno.EEXIST, errno.ENOTDIR)
    if is_in_the_way and (file := next((path for path in (folder, *folder.parents) if path.is_file()), None)) is not None:
        return NotInstalled(f"{file} is a file, not a folder: choose a folder, such as {file.parent / 'hook'}")
    is_full = error.errno in FULL
    step = "free space on the volume" if is_full else "mount the shared volume writable there"
    why = NotInstalled(f"{error.filename or folder}: {error.strerror}; {step}")
    why.is_full = is_full
    return why


def _place_of(folder: Path) -> Place:
    """Return the folder as a place on the shared volume: trainers of earlier pods could write there, so no link is followed."""
    parts = folder.absolute().parts
    above = parts.index(SYSTEM_DIR) if SYSTEM_DIR in parts else len(parts)
    root = Path(*parts[:above])
    root.mkdir(parents=True, exist_ok=True)
    return Folder(root) / "/".join(parts[above:])


def _content(place: Place) -> bytes | None:
    try:
        return place.read(max_bytes=_MOST_BYTES)[0]
    except FileNotFoundError:
        return None


def _digest(files: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for path, content in files.items():
        digest.update(f"{path}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:_HASH_DIGITS]


def _whole_version(place: Place) -> str | None:
    """Return the version that interpreters would find; ``None``: none, or it is not whole."""
    try:
        version = (place / CURRENT).read_link()
        (place / version / PACKAGE / "activation/boot.py").status()
    except OSError:
        return None
    return version


def _place_package(place: Place, version: str, files: dict[str, bytes]) -> None:
    if (place / version).is_folder():
        return  # named for its content, and renamed into place whole
    temporary = place / f".{version}.{secrets.token_hex(4)}.tmp"
    try:
        for path, content in files.items():
            file = temporary / PACKAGE / path
            file.parent.make_folder()
            _write(file, content)
        for inside in ["", *(path for path, status in temporary.walk() if stat.S_ISDIR(status.st_mode))]:
            (temporary / inside).change_mode(0o755)
        temporary.rename(place / version)
    except OSError:
        if not (place / version).is_folder():  # else another install was faster
            raise
    finally:
        temporary.discard()


def _write(place: Place, content: bytes) -> None:
    with opened(place.create()) as fd:
        write_all(fd, content)
        set_mode(fd, 0o644)


def _replace(place: Place, make: Callable[[Place], None]) -> None:
    temporary = place.with_name(f".{place.name}.{secrets.token_hex(4)}.tmp")
    try:
        make(temporary)
        temporary.rename(place)
    finally:
        temporary.discard()
