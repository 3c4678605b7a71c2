"""A checkpoint directory of any program: finished by its marker, or taken as it is found if nothing writes to it."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from sidecar.core.commit.summary import INCOMPLETE_FILE
from sidecar.core.format.attempts import of_pod
from sidecar.core.format.found_checkpoint import Finished, FoundCheckpoint, FoundMarker, Identity, judge
from sidecar.core.format.key_limits import KeyLimits, check_keys
from sidecar.errors import CheckpointChanged, CheckpointRejected, ConfigurationError, RequestRefused
from sidecar.volume.files import opened_as_seen
from sidecar.volume.opener import Folder
from sidecar.volume.walk import examine, walk_files
from trainer_hook.contract import META_OF_DOWNLOAD, META_PARTIAL, ContractError, Node, is_checkpoint_name

QUIET_S = 2.0
"""Seconds without a write after which a directory without a marker counts as finished."""
PUSHED = "push"
"""End of the attempt's id of a directory whose marker names none."""


def checkpoints_in(path: Path) -> dict[str, Path]:
    """Return the checkpoint directories that a path names: itself, or those in it; by name.

    Raises:
        ConfigurationError: It is no directory.
    """
    path = path.absolute()
    if not path.is_dir():
        raise ConfigurationError(f"{path}: no such directory")
    if is_checkpoint_name(path.name):
        return {path.name: path}
    return {each.name: each for each in sorted(path.iterdir()) if is_checkpoint_name(each.name) and each.is_dir()}


class SourceDirectory:
    """One directory, as it was when it was read first."""

    def __init__(self, path: Path, name: str) -> None:
        """Take note of a directory, which is pushed under a checkpoint's name."""
        self._folder = Folder(path)
        self._path = path
        self._name = name
        self._found: FoundCheckpoint | None = None

    async def read(self, limits: KeyLimits) -> Finished:
        """Return the checkpoint in it. ``limits``: of the store.

        Raises:
            RequestRefused: It is unfinished, being written, or holds something that is no file or that the store does not take.
            ConfigurationError: It cannot be read.
        """
        self._found = found = await self._look()
        if not found.marker.content and (left_s := QUIET_S - (time.time() - found.marker.mtime_s)) > 0:
            await asyncio.sleep(min(left_s, QUIET_S))
            if not await self.is_unchanged():
                raise RequestRefused(f"{self._path}: it is being written: push it once it is finished")
        if any(file.path.startswith(INCOMPLETE_FILE) for file in found.files):
            raise RequestRefused(f"{self._path}: {INCOMPLETE_FILE} says that it is not finished: push another step")
        try:
            checkpoint = judge(found, Identity(Node(), of_pod(PUSHED, since_s=found.marker.mtime_s)))
        except ContractError as error:
            raise RequestRefused(f"{self._path}: {error}") from None
        if META_PARTIAL in checkpoint.meta:
            raise RequestRefused(f"{self._path}: a part of a checkpoint, pulled for some ranks: pull all of it first")
        # Where it was downloaded from does not matter in another store.
        meta = {key: value for key, value in checkpoint.meta.items() if key not in META_OF_DOWNLOAD}
        checkpoint = replace(checkpoint, meta=meta, names_attempt=True)
        try:
            check_keys(checkpoint, limits)
        except ContractError as error:
            raise RequestRefused(f"{self._path}: {error}") from None
        return checkpoint

    async def is_unchanged(self) -> bool:
        """Whether the directory still has exactly the files that ``read`` found."""
        return await self._look() == self._found

    def open(self, path: str) -> AbstractContextManager[int]:
        """Open a file for reading, if it is as ``read`` found it. Raises as ``opened_as_seen``."""
        assert self._found is not None
        files = {file.path: file for file in self._found.files}
        if path not in files:
            raise CheckpointChanged(f"{self._name}/{path}")
        return opened_as_seen(self._folder / "", files[path], whose=self._name)

    async def _look(self) -> FoundCheckpoint:
        try:
            return await asyncio.to_thread(self._examined)
        except CheckpointRejected as error:
            raise RequestRefused(f"{self._path}: {error}") from None
        except OSError as error:
            raise ConfigurationError(f"{error.filename or self._path}: {error.strerror}") from None

    def _examined(self) -> FoundCheckpoint:
        place = self._folder / ""
        try:
            return examine(place, self._name)
        except FileNotFoundError:
            with place.held() as held:
                files, irregular = walk_files(held / "")
            newest_ns = max((file.mtime_ns for file in files), default=0)
            return FoundCheckpoint(self._name, files, irregular, FoundMarker(b"", f"unmarked-{newest_ns:x}", newest_ns))
