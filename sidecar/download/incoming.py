"""Unpublished downloads on the volume: removal of earlier ones, and the space that one needs."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import PurePosixPath

from sidecar.core.format.manifest import FileEntry
from sidecar.download.partial_file import names_of
from sidecar.volume.volume import Volume

PARTIAL = "partial"
"""Folder below ``.ckpt/incoming`` for incomplete files."""


def drop_others(volume: Volume, name: str, entries: Sequence[FileEntry]) -> None:
    """Delete the remains of earlier downloads, except the wanted files (``entries``) of the checkpoint ``name``."""
    incoming, partial = volume.incoming / name, volume.incoming / PARTIAL
    for other, is_folder in volume.incoming.entries():
        if other not in (name, PARTIAL) or not is_folder:
            (volume.incoming / other).discard()
    wanted = {entry.path for entry in entries}
    folders = {str(parent) for path in wanted for parent in PurePosixPath(path).parents}
    # Directories, too: another commit of this name may have a directory where this one has a file.
    for path, status in [*incoming.walk(lenient=True)]:
        if path not in (folders if stat.S_ISDIR(status.st_mode) else wanted):
            (incoming / path).discard()
    if begun := [path for path, _ in partial.walk(lenient=True)]:
        continued = {each for entry in entries for each in names_of(entry)}
        for path in begun:
            if path not in continued:
                (partial / path).discard()


def require_space(volume: Volume, name: str, entries: Sequence[FileEntry]) -> None:
    """Check that the volume has space for the missing bytes. Otherwise the download would take space from the trainer.

    Raises:
        OSError: ``ENOSPC``: it has not; what was downloaded before is deleted.
    """
    places = (volume.incoming / name, volume.incoming / PARTIAL)
    there_bytes = sum(status.st_blocks * 512 for place in places for _, status in place.walk(lenient=True))
    missing_bytes = sum(entry.size_bytes for entry in entries) - there_bytes
    free_bytes = volume.free_bytes()
    if missing_bytes > free_bytes and volume.total_bytes():  # 0: a file system that does not tell
        give_space_back(volume, name)
        text = f"{os.strerror(errno.ENOSPC)} ({missing_bytes} bytes are to be downloaded, {free_bytes} are free)"
        raise OSError(errno.ENOSPC, text, str(volume.root))


def give_space_back(volume: Volume, name: str) -> None:
    """Delete the downloaded files of a checkpoint."""
    for place in (volume.incoming / name, volume.incoming / PARTIAL):
        place.discard()
