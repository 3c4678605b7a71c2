"""One mount, ``$CKPT_DIR``: the checkpoints on it, and what this system keeps beside them."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

from sidecar.core.local import Finished, FoundCheckpoint
from sidecar.errors import CheckpointChanged, CheckpointRejected
from sidecar.volume.files import LASTING, is_as_seen, read_regular
from sidecar.volume.leases import held_leases
from sidecar.volume.pins import Pins, held_as
from sidecar.volume.walk import examine, newest_mtime, signature
from trainer_hook.contract import INCOMING, JOURNAL, LEASES, MARKER, MAX_MARKER_BYTES, PINS, SYSTEM_DIR, is_checkpoint_name

EARLY = "early"
"""Stands for the version of a checkpoint that is not finished, in the name of its journal."""


class Volume:
    """One mount, ``$CKPT_DIR``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.incoming = root / INCOMING
        self.journal = root / JOURNAL
        self.pins = Pins(root, root / PINS)

    def prepare(self) -> None:
        """Create what this system owns.

        Raises:
            OSError: The volume is not there or not writable.
        """
        for path in (self.root / SYSTEM_DIR, self.root / PINS, self.incoming, self.journal, self.root / LEASES):
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
            return signature(os.lstat(self.root / name / MARKER))
        except OSError as error:
            if error.errno not in LASTING:
                raise
            return None

    def examine(self, name: str) -> FoundCheckpoint:
        """Read a checkpoint's marker and walk its files.

        Raises:
            CheckpointRejected: The marker cannot be read or is no regular file.
            FileNotFoundError: There is no marker, or the directory is just being deleted.
            OSError: The volume is in trouble; the checkpoint may be sound.
        """
        return examine(self.root / name, name)

    def is_unchanged(self, checkpoint: Finished) -> bool:
        """Whether a checkpoint's directory still holds, under the same marker, exactly the files that were finished."""
        if self.marker_signature(checkpoint.name) != checkpoint.version:
            return False
        try:
            return all(is_as_seen(os.lstat(self.root / checkpoint.name / file.path), file) for file in checkpoint.files)
        except OSError:
            return False

    def drop_journal(self, pin: Path) -> None:
        """Forget what was sent of the version that a pin held."""
        (self.journal / f"{pin.name}.jsonl").unlink(missing_ok=True)

    def early_journal(self, name: str) -> Path:
        """Return the journal of what is sent of a checkpoint before it is finished."""
        return self.journal / f"{name}@{EARLY}.jsonl"

    def left_early(self) -> set[str]:
        """Return the checkpoints of which something was sent early, and which nobody has taken over."""
        names = {path.stem.partition("@")[0] for path in self.journal.glob(f"*@{EARLY}.jsonl")}
        return {name for name in names if is_checkpoint_name(name)}

    def drop_stray_journals(self) -> None:
        """Forget what was sent of versions that are neither pinned nor on the volume any more."""
        early = {self.early_journal(name) for name in self.left_early()}  # somebody else's matter
        for path in set(self.journal.glob("*@*.jsonl")) - early:
            name = path.stem.partition("@")[0]
            current = self.look_at_marker(name) if is_checkpoint_name(name) else None
            if not (self.root / PINS / path.stem).is_dir() and (current is None or path.stem != held_as(name, current)):
                path.unlink(missing_ok=True)

    def fingerprint(self, name: str) -> tuple[int, float, str | None] | None:
        """Return what changes when somebody writes to a checkpoint's directory; ``None`` while there is none."""
        try:
            inode = os.lstat(self.root / name).st_ino
        except OSError:
            return None
        return inode, newest_mtime(self.root / name), self.marker_signature(name)

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
            return read_regular(self.root / path, max_bytes=MAX_MARKER_BYTES + 1)[0]
        except (OSError, CheckpointRejected):
            return None

    def held_leases(self) -> int:
        """Return how many training processes are alive: ranks whose lease another process holds."""
        return held_leases(self.root / LEASES)

    def unfinished(self) -> dict[str, float]:
        """Return the checkpoints without a marker, and when each was last written to, in epoch seconds."""
        return {name: newest_mtime(self.root / name) for name in self.names() if self.marker_signature(name) is None}
