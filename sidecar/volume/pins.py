"""Holding the files of finished checkpoints so that the trainer's own rotation cannot take them away."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import uuid
from contextlib import AbstractContextManager
from pathlib import Path

from sidecar.core.local import Finished, FoundCheckpoint
from sidecar.errors import CheckpointRejected
from sidecar.volume.files import opened_as_seen
from sidecar.volume.walk import examine
from trainer_hook.contract import MARKER, is_checkpoint_name

_CANNOT_LINK = frozenset({errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.EACCES, errno.ENOSPC, errno.EDQUOT})


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

    def open(self, path: str) -> AbstractContextManager[int]:
        """Open a file for reading, as the same file that the walk saw; raises what ``opened_as_seen`` does."""
        return opened_as_seen(self.base, self._expected[path], whose=self.checkpoint.name)

    def exists(self) -> bool:
        """Whether the files can still be found."""
        return self.base.is_dir()


class Pins:
    """What is held, one directory of hard links for each version of a checkpoint.

    Args:
        root: The volume.
        folder: Where the links are, on the same filesystem.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self._root = root
        self._folder = folder

    def hold(self, checkpoint: Finished) -> Pin:
        """Hold the files of a checkpoint. Doing it again returns the same pin.

        Raises:
            Disappeared: They are gone.
            OSError: The volume is in trouble.
        """
        place = self._place_of(checkpoint)
        if place.is_dir():
            return Pin(checkpoint, place, held=True)
        building = place.with_name(f"{place.name}.tmp")
        source = self._root / checkpoint.name
        shutil.rmtree(building, ignore_errors=True)
        try:
            for folder in {os.path.dirname(file.path) for file in checkpoint.files} | {""}:  # noqa: PTH120 - thousands of files
                (building / folder).mkdir(parents=True, exist_ok=True)
            for path in [*(file.path for file in checkpoint.files), MARKER]:
                os.link(f"{source}/{path}", f"{building}/{path}", follow_symlinks=False)
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

    def holds(self, checkpoint: Finished) -> bool:
        """Whether the files stay, also when the trainer deletes them."""
        return self._place_of(checkpoint).is_dir()

    def release(self, checkpoint: Finished) -> None:
        """Let the files go."""
        self.drop(self._place_of(checkpoint))

    def left(self) -> list[Path]:
        """Return the pins that an earlier life of the sidecar left; those that it did not finish are dropped."""
        with os.scandir(self._folder) as entries:
            found = sorted(Path(e.path) for e in entries if e.is_dir(follow_symlinks=False))
        for place in (unfinished := [p for p in found if not _is_pin(p)]):
            shutil.rmtree(place, ignore_errors=True)
        return [place for place in found if place not in unfinished]

    def examine(self, place: Path) -> FoundCheckpoint:
        """Read what a pin holds.

        Raises:
            FileNotFoundError: Its marker is missing: it holds nothing.
            CheckpointRejected: It cannot be read by this user.
            OSError: The volume is in trouble; the pin may be sound.
        """
        return examine(place, place.name.partition("@")[0])

    def holds_its_version(self, place: Path, found: FoundCheckpoint) -> bool:
        """Whether a pin's marker is still the one that it was made for.

        The marker in a pin is a link: ``echo {} > .complete`` rewrites it there, too, and the pin's other files are then
        those of the version before.
        """
        return place.name == held_as(found.name, found.marker.signature)

    def drop(self, place: Path) -> None:
        """Let go what a pin holds. It stops being a pin at once: a kill in the middle leaves nothing that looks whole."""
        going = place.with_name(f"{place.name}.{uuid.uuid4().hex[:8]}.tmp")
        with contextlib.suppress(OSError):
            place.rename(going)
        shutil.rmtree(going, ignore_errors=True)

    def _place_of(self, checkpoint: Finished) -> Path:
        return self._folder / held_as(checkpoint.name, checkpoint.version)


def version_id(version: str) -> str:
    """Return a short, file-name-safe id of a marker's version."""
    return hashlib.blake2b(version.encode(), digest_size=6).hexdigest()


def held_as(name: str, version: str) -> str:
    """Return the name of the pin, and of the journal, of one version of a checkpoint."""
    return f"{name}@{version_id(version)}"


def _is_pin(place: Path) -> bool:
    return not place.name.endswith(".tmp") and is_checkpoint_name(place.name.partition("@")[0])
