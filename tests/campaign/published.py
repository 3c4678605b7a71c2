"""What trainers published: every version of every checkpoint, by the hashes of its files."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.campaign.reader import Commit, Content, content_of, step_of

Files = dict[str, Content]


@dataclass(frozen=True)
class Version:
    """One writing of a checkpoint: the files of each node."""

    name: str
    pod: str
    nodes: Mapping[int, Files]


class Published:
    """All versions of a run."""

    def __init__(self) -> None:
        self._versions: dict[str, list[Version]] = {}
        self._lock = threading.Lock()

    def add(self, name: str, pod: str, nodes: Mapping[int, Files]) -> Version:
        """Record a version, before its marker is there: from then on it may be committed."""
        version = Version(name, pod, nodes)
        with self._lock:
            self._versions.setdefault(name, []).append(version)
        return version

    def count(self, name: str) -> int:
        with self._lock:
            return len(self._versions.get(name, ()))

    def last_step(self) -> int:
        """Return the highest step of any version; 0: there is none."""
        with self._lock:
            return max(map(step_of, self._versions), default=0)

    def is_not_before(self, version: Version, other: Version) -> bool:
        """Whether a version of a checkpoint is another one, or was published after it."""
        with self._lock:
            known = self._versions[version.name]
            return known.index(version) >= known.index(other)

    def of_commit(self, commit: Commit) -> Version | None:
        """Return the version that a commit holds; ``None``: none, so it is wrong."""
        with self._lock:
            found = reversed(self._versions.get(commit.name, []))
            return next((version for version in found if dict(version.nodes) == commit.nodes), None)

    def of_folder(self, folder: Path, *, node: int = 0) -> Version | None:
        """Return the version whose files a folder has, as node ``node`` gets them."""
        there = files_of(folder)
        with self._lock:
            found = reversed(self._versions.get(folder.name, []))
            return next((version for version in found if _seen_by(version, node) == there), None)


def _seen_by(version: Version, node: int) -> Files:
    """Return all files of all nodes; of those that differ, the own one, else that of the lowest index (I6)."""
    merged: Files = {}
    for index in sorted(version.nodes, reverse=True):
        merged |= version.nodes[index]
    return merged | version.nodes.get(node, {})


def files_of(folder: Path) -> Files:
    """Return the files of a checkpoint but its marker."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != ".complete")
    return {path.relative_to(folder).as_posix(): content_of(path.read_bytes()) for path in found}
