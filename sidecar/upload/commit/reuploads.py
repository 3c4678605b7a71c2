"""Files to upload again: their object was lost or damaged in the store, or another node owns their key."""

from __future__ import annotations

from collections.abc import Mapping

from sidecar.core.format import keys
from sidecar.core.format.found_checkpoint import Finished


class Reuploads:
    """Files that a commit requires again, by version of a checkpoint. Kept until that version is released."""

    def __init__(self) -> None:
        self._moved: dict[str, dict[str, str]] = {}
        self._damaged: dict[str, frozenset[str]] = {}

    def ask(self, checkpoint: Finished, files: Mapping[str, str]) -> None:
        """Request files again. ``files``: key by path."""
        moved = {path: key for path, key in files.items() if key != keys.shared_file(checkpoint.name, path)}
        self._moved.setdefault(checkpoint.version, {}).update(moved)
        self._damaged[checkpoint.version] = self.damaged(checkpoint.version) | frozenset(files)

    def moved(self, version: str) -> Mapping[str, str]:
        """Return the keys of files whose own key another node owns (I6), by path."""
        return self._moved.get(version, {})

    def damaged(self, version: str) -> frozenset[str]:
        """Return the paths whose objects differ from our manifest: they must not be adopted from it."""
        return self._damaged.get(version, frozenset())

    def published(self, version: str) -> None:
        """Take note of a manifest that was written after all damaged files were sent again."""
        self._damaged.pop(version, None)

    def forget(self, version: str) -> None:
        """Forget a version that is durable, or will not be sent."""
        self._moved.pop(version, None)
        self._damaged.pop(version, None)
