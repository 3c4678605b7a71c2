"""The mount ``$CKPT_DIR``: the checkpoints on it, and the system's own files next to them."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from contextlib import suppress
from pathlib import Path

import structlog

from sidecar.core.format.found_checkpoint import Finished, FoundCheckpoint
from sidecar.core.format.obstacles import may_pass
from sidecar.errors import CheckpointChanged, CheckpointRejected
from sidecar.volume.bulk import statuses
from sidecar.volume.files import DENIED, PERMANENT_ERRORS, is_as_seen, read_small
from sidecar.volume.leases import held_leases
from sidecar.volume.opener import Folder, Place
from sidecar.volume.pins import Pins, held_as
from sidecar.volume.walk import examine, newest_mtime, version_at
from trainer_hook.contract import INCOMING, JOURNAL, LEASES, MARKER, PINS, SYSTEM_DIR, is_checkpoint_name

log = structlog.get_logger()

MOST_REFUSED = 100
"""Maximum number of refused paths in the log."""
ANOTHER_MOUNT = "on-another-mount-0"
"""Version of the marker of a directory on another mount, in the form of a marker's: examining it gives the reason."""
EARLY = "early"
"""Substitute for the version of an unfinished checkpoint, in the name of its journal."""


class Volume:
    """The mount ``$CKPT_DIR``, with the sidecar's own state.

    Args:
        root: The mount. It may be a link; below it none is followed.
        state: ``$CKPT_STATE_DIR``, where the trainer cannot write; ``None``: the sidecar's state is on the shared volume, too.
    """

    def __init__(self, root: Path, state: Path | None = None) -> None:
        self.root = root
        """Path for messages and API answers. For access use ``volume / "its/path"``."""
        self._folder = Folder(root, on_refused=self._log_refused)
        self._refused: set[str] = set()
        self.has_own_state = state is not None
        self.state = self / SYSTEM_DIR if state is None else Folder(state) / ""
        self.incoming = self / INCOMING
        self.journal = self.state / Path(JOURNAL).name
        self.pins = Pins(self / "", self / PINS)

    def __truediv__(self, inside: str) -> Place:
        return self._folder / inside

    def _log_refused(self, path: str, error: OSError) -> None:
        if path not in self._refused and len(self._refused) < MOST_REFUSED:
            self._refused.add(path)
            log.warning(
                "path_refused", path=path, error=error.strerror, hint=f"links and mounts below {self.root} are not followed"
            )

    def prepare(self) -> None:
        """Create the system's directories. The volume itself is never created: that would hide a missing mount.

        Raises:
            OSError: The volume is missing or not writable.
        """
        system = self / SYSTEM_DIR
        system.make_folder()
        if not system.is_folder():
            raise NotADirectoryError(errno.ENOTDIR, "a link or file where a directory should be: remove it", str(system))
        # Trainer and sidecar may be different users of one group: the creator makes the directory group-writable.
        self._own(system, 0o2775)
        for place in (self / PINS, self.incoming):
            self._own(place, 0o2775)
        self._own(self / LEASES, 0o2777)
        if not self.has_own_state:
            self._own(self.journal, 0o2775)

    def prepare_state(self) -> None:
        """Create the content of the state directory, if there is one.

        Raises:
            OSError: It is missing or not writable.
        """
        if self.has_own_state:
            self._own(self.journal, 0o700)
            (self.journal / ".writable").publish(b"")
            (self.journal / ".writable").remove()

    def _own(self, place: Place, mode: int) -> None:
        if place.own_folder(mode):
            log.warning("not_a_directory", path=str(place), hint="removed, and made as a directory")

    def forget_journals_of_trainer(self) -> list[str]:
        """Delete journals that the trainer can write to, if this process keeps its own elsewhere. Returns their names.

        Journals are a cache: their content is determined again, or sent again. Using them would mean trusting the trainer.
        """
        shared = self / JOURNAL
        if not self.has_own_state or not shared.is_folder():
            return []
        names = [name for name, _ in shared.entries()]
        shared.discard()
        return names

    def names(self) -> list[str]:
        """Return the directories, and links, that have a checkpoint's name. A link is rejected; nothing follows it.

        Raises:
            OSError: The volume is missing or cannot be read.
        """
        self._folder.refresh()
        named = [(name, is_folder) for name, is_folder in (self / "").entries() if is_checkpoint_name(name)]
        return [name for name, is_folder in named if is_folder or self._version_of_link(name) is not None]

    def _version_of_link(self, name: str) -> str | None:
        """Return the version of a link in the place of a checkpoint's directory; ``None``: there is none."""
        try:
            status = (self / name).status()
        except FileNotFoundError:
            return None
        return version_at(status) if stat.S_ISLNK(status.st_mode) else None

    def marker_version(self, name: str) -> str | None:
        """Return the version of a checkpoint's marker, or ``None`` if there is none, or it cannot be read now."""
        try:
            return self.read_marker_version(name)
        except OSError:
            return None

    def read_marker_version(self, name: str) -> str | None:
        """Return the version of a checkpoint's marker, ``None`` only if there is none.

        For a directory on another mount this is ``ANOTHER_MOUNT``, for a link in its place the link's own version; ``examine``
        then raises the reason.

        Raises:
            OSError: The volume failed, or this user may not look there; there may be a marker.
        """
        try:
            return version_at((self / name / MARKER).status())
        except OSError as error:
            if error.errno not in PERMANENT_ERRORS:
                raise
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                return self._version_of_link(name)
            return ANOTHER_MOUNT if error.errno == errno.EXDEV else None

    def finished_versions(self) -> list[str]:
        """Return the versions of all markers on the volume and in pins; those that cannot be read now are left out.

        Raises:
            OSError: The volume cannot be listed now, which may pass.
        """
        try:
            return self._versions(transient=[])
        except OSError as error:
            if may_pass(error.errno):
                raise
            return []

    def all_finished_versions(self) -> list[str]:
        """Return the same, of all markers that this user can ever read.

        Raises:
            OSError: The volume cannot be listed, or a marker cannot be read now.
        """
        transient: list[OSError] = []
        found = self._versions(transient)
        if transient:
            raise transient[0]
        return found

    def _versions(self, transient: list[OSError]) -> list[str]:
        found = []
        for folder in [self / name for name in self.names()] + self.pins.of_earlier_process():
            try:
                found.append(version_at((folder / MARKER).status()))
            except OSError as error:
                if error.errno != errno.ENOENT and error.errno not in PERMANENT_ERRORS | DENIED:
                    transient.append(error)
        return found

    def examine(self, name: str) -> FoundCheckpoint:
        """Read a checkpoint's marker and walk its files.

        Raises:
            CheckpointRejected: The marker is no regular file.
            FileNotFoundError: There is no marker, or the directory is just being deleted.
            OSError: The volume failed, or this user may not read there; the checkpoint may be intact.
        """
        return examine(self / name, name)

    def is_unchanged(self, checkpoint: Finished) -> bool:
        """Whether a checkpoint's directory still has the same marker and exactly the finished files."""
        if self.marker_version(checkpoint.name) != checkpoint.version:
            return False
        try:
            files = {file.path: file for file in checkpoint.files}
            return all(is_as_seen(status, files[path]) for path, status in statuses(self / checkpoint.name, files))
        except OSError:
            return False

    def drop_journal(self, pin: Place) -> None:
        """Delete the upload journal of a pinned version."""
        (self.journal / f"{pin.name}.jsonl").discard()

    def early_journal(self, name: str) -> Place:
        """Return the journal of a checkpoint's early upload."""
        return self.journal / f"{name}@{EARLY}.jsonl"

    def journals(self) -> list[Place]:
        """Return all journals, also of earlier sidecar processes. The checkpoint's name precedes the ``@``."""
        names = [name for name, _ in self.journal.entries() if name.endswith(".jsonl")]
        return [self.journal / name for name in names if is_checkpoint_name(journal_of(name))]

    def early_uploads(self) -> set[str]:
        """Return the names of checkpoints with the journal of an early upload that was not taken over."""
        try:
            journals = self.journals()
        except OSError:
            return set()
        return {journal_of(place.name) for place in journals if place.name.endswith(f"@{EARLY}.jsonl")}

    def drop_stray_journals(self) -> None:
        """Delete the journals of versions that are neither pinned nor on the volume."""
        for place in self.journals():
            name, held_by = journal_of(place.name), place.name.removesuffix(".jsonl")
            if place.name.endswith(f"@{EARLY}.jsonl"):  # early uploads handle their own
                continue
            current = self.read_marker_version(name)
            if not (self / PINS / held_by).is_folder() and (current is None or held_by != held_as(name, current)):
                place.discard()

    def fingerprint(self, name: str) -> tuple[int, float, str | None] | None:
        """Return a value that changes with any write to a checkpoint's directory; ``None``: there is no directory."""
        try:
            inode = (self / name).status().st_ino
        except OSError:
            return None
        return inode, newest_mtime(self / name), self.marker_version(name)

    def put_in_place(self, incoming: Place, name: str, *, replacing: tuple[int, float, str | None] | None) -> Path:
        """Rename a complete directory to its name on the volume.

        Args:
            incoming: The directory, below ``.ckpt/incoming``.
            name: Its name.
            replacing: The ``fingerprint`` of the directory that may be replaced; ``None``: none may exist.

        Raises:
            CheckpointChanged: The trainer wrote to that name meanwhile; its directory stays.
        """
        target = self / name
        if self.fingerprint(name) != replacing:
            raise CheckpointChanged(name)
        if replacing is None:
            incoming.rename(target)
            return self.root / name
        # A rename does not replace a non-empty directory: the old one is renamed first and deleted afterwards.
        aside = self.incoming / f"replaced-{uuid.uuid4().hex[:8]}"
        target.rename(aside)
        incoming.rename(target)
        aside.discard()
        return self.root / name

    def delete(self, name: str) -> None:
        """Delete a local checkpoint, its marker first, so that the rest does not count as a checkpoint.

        Raises:
            OSError: It stays as it is, because this user may not delete all of it; or a rest without a marker stays.
        """
        folder = self / name
        with suppress(FileNotFoundError):  # somebody else deletes it
            folder.require_removable()
        (folder / MARKER).remove()
        folder.discard()
        if folder.is_folder():
            raise OSError(errno.ENOTEMPTY, "its marker was deleted, a part of it cannot be", str(folder))

    def free_bytes(self) -> int:
        """Return the free bytes for an unprivileged writer."""
        space = self._space()
        return space.f_bavail * space.f_frsize

    def total_bytes(self) -> int:
        """Return the size of the volume."""
        space = self._space()
        return space.f_blocks * space.f_frsize

    def _space(self) -> os.statvfs_result:
        self._folder.refresh()
        return (self / "").space()

    def read_small(self, path: str, *, surely: bool = False) -> bytes | None:
        """Return the content of a small file of the contract, or ``None`` if it is missing or cannot be read.

        ``surely``: raise ``OSError`` where the volume fails in a way that may pass: the file may be there.
        """
        return _small(self / path, surely=surely)

    def read_state(self, name: str, *, surely: bool = False) -> bytes | None:
        """Return the content of a small file of the sidecar's state, or ``None`` as ``read_small``."""
        return _small(self.state / name, surely=surely)

    def held_leases(self) -> int:
        """Return the number of living training processes: leases held by other processes."""
        return held_leases(self / LEASES)

    def unfinished(self) -> dict[str, float]:
        """Return the time of the last write (epoch seconds) of each checkpoint without a marker, by name."""
        return {name: newest_mtime(self / name) for name in self.names() if self.marker_version(name) is None}


def journal_of(file_name: str) -> str:
    """Return the checkpoint's name in a journal's file name."""
    return file_name.partition("@")[0]


def _small(place: Place, *, surely: bool) -> bytes | None:
    try:
        return read_small(place)[0]
    except CheckpointRejected:
        return None
    except OSError as error:
        if surely and may_pass(error.errno):
            raise
        return None
