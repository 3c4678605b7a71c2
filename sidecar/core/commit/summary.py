"""Summary of the checkpoints below a prefix, from a listing of its objects alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from sidecar.core.commit.commit import attempt_of
from sidecar.core.format import keys
from trainer_hook.contract import MARKER, SYSTEM_DIR, is_checkpoint_name, step_of

INCOMPLETE_FILE = "checkpoint-is-incomplete.txt"
"""Beginning of the names of the files, one a rank, with which the Kubeflow SDK marks an unfinished checkpoint."""


class StoredState(StrEnum):
    """State of a checkpoint in the store."""

    COMMITTED = "committed"
    BAD = "bad"
    """It is committed, and its commit failed verification."""
    UNREADABLE = "unreadable"
    """Its commit cannot be used: it does not parse, or an archive has it."""
    INCOMPLETE = "incomplete"
    """It has no commit: it is being uploaded or deleted, or was abandoned."""
    FOREIGN = "foreign"
    """Another program wrote it: there is neither a commit nor a manifest."""


@dataclass(slots=True)
class Summary:
    """One checkpoint, as a listing shows it."""

    name: str
    is_committed: bool = False
    objects: int = 0
    """Number of its files' objects, without documents."""
    size_bytes: int = 0
    """Sum of their sizes."""
    modified: str = ""
    """Time of the commit by the store's clock, without one that of the latest object; empty: unknown."""
    quarantines: list[str] = field(default_factory=list)
    """Keys of its quarantine records. Each applies to one commit, which may be an earlier one."""
    has_documents: bool = False
    """There is a manifest, or another document of this system."""
    is_marked_incomplete: bool = False
    """Another program has marked it as still being written."""

    @property
    def step(self) -> int | None:
        """Its step; ``None``: ``final``."""
        return step_of(self.name)

    @property
    def state(self) -> StoredState:
        """The state, as far as a listing shows it: never ``BAD`` or ``UNREADABLE``."""
        if self.is_committed:
            return StoredState.COMMITTED
        is_foreign = not self.has_documents and not self.is_marked_incomplete
        return StoredState.FOREIGN if is_foreign else StoredState.INCOMPLETE

    def add(self, path: str, size_bytes: int, modified: str) -> None:
        """Add an object. ``path``: its key without the checkpoint's folder."""
        key = f"{self.name}/{path}"
        if path == MARKER:
            self.is_committed, self.modified = True, modified
            return
        if not self.is_committed:  # otherwise the time of the commit stays
            self.modified = max(self.modified, modified)
        if keys.is_quarantine(key, self.name):
            self.quarantines.append(key)
        elif attempt_of(key, self.name) is None and key != keys.deletion(self.name):
            self.objects, self.size_bytes = self.objects + 1, self.size_bytes + size_bytes
            self.is_marked_incomplete |= path.startswith(INCOMPLETE_FILE)
        self.has_documents |= path.startswith(f"{SYSTEM_DIR}/")


def summaries(objects: Iterable[tuple[str, int, str]]) -> dict[str, Summary]:
    """Return the checkpoints among objects, by name.

    ``objects``: key, size in bytes and time of the write of each, in any order. Keys of other content are ignored.
    """
    found: dict[str, Summary] = {}
    for key, size_bytes, modified in objects:
        name, slash, path = key.partition("/")
        if name not in found:
            if not slash or not is_checkpoint_name(name):
                continue
            found[name] = Summary(name)
        found[name].add(path, size_bytes, modified)
    return found
