"""``checkpoint-sidecar install-hook DIR``: puts the trainer's side where a container without it finds it, by PYTHONPATH alone.

``DIR/sitecustomize.py`` looks through the link ``DIR/trainer_hook-current`` at a folder that is named for its content and never
changes. So an interpreter that starts while another version is being installed sees the whole old or the whole new one,
and a process that runs keeps the one that it began with.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import trainer_hook
from trainer_hook import CURRENT, PACKAGE

_HASH_DIGITS = 12


class NotInstalled(Exception):
    """The text names the path and says what to do."""


@dataclass(frozen=True, slots=True)
class Installed:
    """Where the hook lies now."""

    folder: Path
    """What goes onto ``PYTHONPATH``."""
    version: str
    """Name of the folder that holds the package."""
    is_new: bool
    """False: it was there already."""


def install(folder: Path) -> Installed:
    """Copy the hook into a folder, all of it or nothing. Doing it again changes nothing.

    Every file can be read by every user: the trainer may run as another one.

    Raises:
        NotInstalled: The folder cannot be written, or holds a ``sitecustomize.py`` of somebody else.
    """
    source = Path(trainer_hook.__file__).resolve().parent
    files = {path.relative_to(source): path.read_bytes() for path in sorted(source.rglob("*.py"))}
    starter = files[Path("activation/inject/sitecustomize.py")]
    version = f"{PACKAGE}-{_digest(files)}"
    target = folder / "sitecustomize.py"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_new = not (target.is_file() and target.read_bytes() == starter and _points_at(folder, version))
        if is_new:
            if target.exists() and PACKAGE.encode() not in target.read_bytes():
                raise NotInstalled(f"{target} is somebody else's: choose a folder of its own, such as {folder / 'hook'}")
            _place_package(folder, version, files)
            _replace(folder / CURRENT, lambda temporary: temporary.symlink_to(version))
            # Last on purpose: from now on interpreters look here.
            _replace(target, lambda temporary: _write(temporary, starter))
    except OSError as error:
        raise NotInstalled(f"{error.filename or folder}: {error.strerror}; mount the shared volume writable there") from None
    return Installed(folder, version, is_new)


def _digest(files: dict[Path, bytes]) -> str:
    digest = hashlib.sha256()
    for path, content in files.items():
        digest.update(f"{path.as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:_HASH_DIGITS]


def _points_at(folder: Path, version: str) -> bool:
    link = folder / CURRENT
    return link.is_symlink() and str(link.readlink()) == version and (link / PACKAGE / "activation/boot.py").is_file()


def _place_package(folder: Path, version: str, files: dict[Path, bytes]) -> None:
    if (folder / version).is_dir():
        return  # named for its content, and renamed into place whole
    temporary = folder / f".{version}.{secrets.token_hex(4)}.tmp"
    try:
        for path, content in files.items():
            place = temporary / PACKAGE / path
            place.parent.mkdir(parents=True, exist_ok=True)
            _write(place, content)
        for inside, _, _ in os.walk(temporary):
            Path(inside).chmod(0o755)
        temporary.rename(folder / version)
    except OSError:
        if not (folder / version).is_dir():  # else another install was faster
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o644)


def _replace(path: Path, make: Callable[[Path], None]) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        make(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
