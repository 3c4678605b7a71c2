"""Pins: hard links to the files of finished checkpoints, so that the trainer's own rotation cannot delete them."""

from __future__ import annotations

import errno
import hashlib
import threading
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import structlog

from sidecar.core.format.found_checkpoint import Finished, FoundCheckpoint
from sidecar.errors import CheckpointRejected
from sidecar.volume.bulk import link_files
from sidecar.volume.files import opened_as_seen
from sidecar.volume.opener import REFUSED, Place
from sidecar.volume.walk import examine
from trainer_hook.contract import MARKER, is_checkpoint_name

log = structlog.get_logger()

_CANNOT_LINK = REFUSED | {
    errno.EPERM,
    errno.EMLINK,
    errno.ENOTSUP,
    errno.EACCES,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,  # after a disk error: finished files can be read, and cannot be deleted
}


class Disappeared(CheckpointRejected):
    """A finished checkpoint was deleted before its files could be pinned."""


class Pin:
    """The files of one finished checkpoint, pinned until they are durable.

    Held by hard links below ``.ckpt/pins``. If links are impossible (another user's files, another mount), nothing protects
    the files from deletion by the trainer: ``held`` is False then, and the status shows it.
    """

    def __init__(self, checkpoint: Finished, base: Place, source: Place, *, held: bool) -> None:
        """``base``: where the files are opened. ``source``: the checkpoint's own directory."""
        self.checkpoint = checkpoint
        self.base = base
        self.held = held
        self._source = source
        self._expected = {file.path: file for file in checkpoint.files}

    @contextmanager
    def open(self, path: str) -> Iterator[int]:
        """Open a file for reading, if unchanged since the walk. Raises as ``opened_as_seen``.

        Where somebody removed or replaced the link, the file in the checkpoint's own directory is opened: it is the same one.
        """
        with ExitStack() as stack:
            try:
                fd = stack.enter_context(self._opened(self.base, path))
            except CheckpointRejected:
                if not self.held:
                    raise
                fd = stack.enter_context(self._opened(self._source, path))
            yield fd

    def _opened(self, place: Place, path: str) -> AbstractContextManager[int]:
        return opened_as_seen(place, self._expected[path], whose=self.checkpoint.name)


class Pins:
    """All pins: one directory of hard links for each version of a checkpoint.

    The trainer can write there, so a pin is trusted no more than a checkpoint's directory: it is examined and judged like one,
    and each file is compared with the walk when it is opened.

    ``folder``: where the links are, on the same filesystem as ``root``, the volume.
    """

    def __init__(self, root: Place, folder: Place) -> None:
        self._root = root
        self._folder = folder
        self._not_removed: list[Place] = []
        """Directories of links of which a part stayed, such as files that are open, on NFS."""
        self._not_set_aside: dict[str, Place] = {}
        """Pins that have ended and could not be renamed, by name."""
        self._holding = threading.Lock()
        """Held while a pin is made or kept, and while one that has ended is renamed late: they may be of one version."""

    def hold(self, checkpoint: Finished) -> Pin:
        """Pin the files of a checkpoint. A second call returns the same pin.

        Raises:
            Disappeared: They were deleted.
            OSError: The volume failed.
        """
        with self._holding:
            return self._hold(checkpoint, self._place_of(checkpoint), self._root / checkpoint.name)

    def _hold(self, checkpoint: Finished, place: Place, source: Place) -> Pin:
        self._not_set_aside.pop(place.name, None)
        if place.is_folder():
            return Pin(checkpoint, place, source, held=True)
        building = place.with_name(f"{place.name}.tmp")
        building.discard()
        try:
            link_files(source, building, [*(file.path for file in checkpoint.files), MARKER])
            building.rename(place)
        except FileNotFoundError:
            building.discard()
            raise Disappeared(f"{checkpoint.name}: its files disappeared before they could be held") from None
        except OSError as error:
            building.discard()
            if error.errno not in _CANNOT_LINK:
                raise
            if error.errno in REFUSED:
                log.warning("checkpoint_not_held", checkpoint=checkpoint.name, error=str(error), hint="it is sent unheld")
            return Pin(checkpoint, source, source, held=False)
        return Pin(checkpoint, place, source, held=True)

    def holds(self, checkpoint: Finished) -> bool:
        """Whether the files remain if the trainer deletes them."""
        return self._place_of(checkpoint).is_folder()

    def release(self, checkpoint: Finished) -> None:
        """Remove the pin of a checkpoint."""
        self.remove(self.set_aside(checkpoint))

    def set_aside(self, checkpoint: Finished) -> Place:
        """End the pin of a checkpoint, and return its directory of links for ``remove``, which may take long."""
        return self._set_aside(self._place_of(checkpoint))

    def remove(self, links: Place) -> None:
        """Remove a directory of links that was set aside. ``remove_rest`` tries again where a part stays."""
        if not links.discard():
            self._not_removed.append(links)

    def remove_rest(self) -> None:
        """Remove pins that have ended and what stayed of directories of links."""
        for name in list(self._not_set_aside):
            with self._holding:
                place = self._not_set_aside.pop(name, None)
                if place is not None:
                    self._not_removed.append(self._set_aside(place))
        rest, self._not_removed = self._not_removed, []
        for links in rest:
            self.remove(links)

    def of_earlier_process(self) -> list[Place]:
        """Return the pins of an earlier sidecar process. Its incomplete pins are removed."""
        found = sorted(name for name, is_folder in self._folder.entries() if is_folder)
        for name in (unfinished := [name for name in found if not _is_pin(name)]):
            (self._folder / name).discard()
        return [self._folder / name for name in found if name not in unfinished]

    def examine(self, place: Place) -> FoundCheckpoint:
        """Read the marker and the files of a pin.

        Raises:
            FileNotFoundError: Its marker is missing, so it holds no checkpoint.
            CheckpointRejected: It is no checkpoint of regular files.
            OSError: The volume failed, or this user may not read there; the pin may be intact.
        """
        return examine(place, place.name.partition("@")[0])

    def holds_its_version(self, place: Place, found: FoundCheckpoint) -> bool:
        """Whether a pin's marker is still the one that it was made for.

        The marker in a pin is a link: ``echo {} > .complete`` rewrites it there, too, and the pin's other files are then
        those of the version before.
        """
        return place.name == held_as(found.name, found.marker.version)

    def drop(self, place: Place) -> None:
        """Remove a pin. It is renamed first, so that a kill in the middle leaves nothing that looks complete."""
        self.remove(self._set_aside(place))

    def _set_aside(self, place: Place) -> Place:
        doomed = place.with_name(f"{place.name}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            place.rename(doomed)
        except FileNotFoundError:
            pass
        except OSError:
            self._not_set_aside[place.name] = place
        return doomed

    def _place_of(self, checkpoint: Finished) -> Place:
        return self._folder / held_as(checkpoint.name, checkpoint.version)


def version_id(version: str) -> str:
    """Return a short, file-name-safe id of a marker's version."""
    return hashlib.blake2b(version.encode(), digest_size=6).hexdigest()


def held_as(name: str, version: str) -> str:
    """Return the name of the pin, and of the journal, of one version of a checkpoint."""
    return f"{name}@{version_id(version)}"


def _is_pin(name: str) -> bool:
    return not name.endswith(".tmp") and is_checkpoint_name(name.partition("@")[0])
