"""Records of the ranks of a node beside their leases: who has written its part, and which folder was begun."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from trainer_hook import contract
from trainer_hook.contract.typed_json import json_object
from trainer_hook.volume.checkpoint_folder import remove_wholly
from trainer_hook.volume.publish import make_system_folders, publish


class RankRecords:
    """Records by which the ranks of a node learn that all have written their part, without a collective.

    Each rank writes a record; a rank that then sees the records of all local ranks finishes the checkpoint. If two see them at
    the same time, the one that deletes the first record does.
    """

    def __init__(self, volume: Path, *, attempt: str, rank: int, local_ranks: int) -> None:
        self._volume = volume
        self._folder = volume / contract.LEASES
        self._attempt = attempt
        self._rank = rank
        self._local_ranks = local_ranks

    def record_part(self, name: str) -> bool:
        """Record that this rank has written its part of a checkpoint. Returns whether this rank finishes it.

        Raises ``OSError``: the record could not be written, and the checkpoint stays unfinished.
        """
        if self._local_ranks == 1:
            return True
        publish(self._path(name, self._rank), contract.encode_json({"attempt": self._attempt}))
        ours = sorted(path for path in self._folder.glob(f"{name}.*.done") if self._is_ours(path))
        if len(ours) < self._local_ranks:
            return False
        try:
            ours[0].unlink()
        except FileNotFoundError:
            return False
        return True

    def may_replace(self, folder: Path) -> bool:
        """Whether a folder holds nothing but a checkpoint, finished or begun: no files of the script's own."""
        if self._begun(folder.name).exists() or (folder / contract.MARKER).is_file():
            return True
        try:
            return not os.listdir(folder)  # noqa: PTH208 - names are enough
        except FileNotFoundError:
            return True

    def begin(self, name: str) -> None:
        """Record that what is in the folder of this name from now on is ours, until it is finished.

        Raises ``OSError``: the volume is full, not writable or not there any more.
        """
        make_system_folders(self._volume)  # a script may empty its output folder
        publish(self._begun(name), b"")

    def begin_anew(self, folder: Path) -> None:
        """Do as ``begin``, and delete what is in the folder. May be repeated.

        Raises ``OSError``: as ``begin``, or a file cannot be deleted.
        """
        self.begin(folder.name)
        remove_wholly(folder)
        self.clear(folder.name)

    def end(self, name: str) -> None:
        """Take the record of ``begin`` back."""
        self._begun(name).unlink(missing_ok=True)

    def _begun(self, name: str) -> Path:
        return self._folder / f"{name}.begun"

    def clear(self, name: str) -> None:
        """Remove the records of a checkpoint."""
        for path in self._folder.glob(f"{name}.*.done"):
            path.unlink(missing_ok=True)

    def finished(self, name: str) -> None:
        """Remove what is recorded of a checkpoint that is finished. Errors are ignored: its next save does it first."""
        with contextlib.suppress(OSError):
            self.clear(name)
            self.end(name)

    def _path(self, name: str, rank: int) -> Path:
        return self._folder / f"{name}.{rank}.done"

    def _is_ours(self, path: Path) -> bool:
        try:
            return bool(json_object(path.read_bytes(), what=path.name).get("attempt") == self._attempt)
        except (OSError, contract.ContractError):
            return False
