"""Files whose object has to be written again: they were lost or damaged in the store, or another node owns their key."""

from __future__ import annotations

from collections.abc import Mapping

from sidecar.core.format import keys
from sidecar.core.format.found_checkpoint import Finished


class Reuploads:
    """What the commit found to be sent again, by version of a checkpoint. Kept until that version is let go."""

    def __init__(self) -> None:
        self._moved: dict[str, dict[str, str]] = {}
        self._damaged: dict[str, frozenset[str]] = {}

    def ask(self, checkpoint: Finished, files: Mapping[str, str]) -> None:
        """Have files sent again, by path, under these keys."""
        moved = {path: key for path, key in files.items() if key != keys.shared_file(checkpoint.name, path)}
        self._moved.setdefault(checkpoint.version, {}).update(moved)
        self._damaged[checkpoint.version] = frozenset(files)

    def moved(self, version: str) -> Mapping[str, str]:
        """Return the keys of files whose own key another node owns (I6), by path."""
        return self._moved.get(version, {})

    def take_damaged(self, version: str) -> frozenset[str]:
        """Return, once, the paths whose object is not what our manifest says: they are sent, whatever the manifest says."""
        return self._damaged.pop(version, frozenset())

    def forget(self, version: str) -> None:
        """This version is durable, or nothing more is sent of it."""
        self._moved.pop(version, None)
        self._damaged.pop(version, None)
