"""Listing of a prefix: its checkpoints, or the runs below it. Reads no commit unless one may be quarantined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from sidecar.core.commit.resume import newest_first
from sidecar.core.commit.summary import StoredState, Summary, summaries
from sidecar.core.format import keys
from sidecar.core.lifecycle.prefix_ownership import Run
from sidecar.errors import ConfigurationError, NotFound, UnreadableRun, UnusableNow
from sidecar.lifecycle.run_document import read
from sidecar.repository.documents import Documents, StoredCommit
from trainer_hook.contract import FINAL

FEW_OBJECTS = 1000
"""Number of objects up to which a listing is one page. Pages follow each other, so a longer one is read in parts at once."""
_DIGITS = "0123456789"


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """One checkpoint in the store."""

    summary: Summary
    state: StoredState
    commit: StoredCommit | None = None
    """Its commit, if it was read."""


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A run below a prefix. ``name`` is empty for the run of the prefix itself."""

    name: str
    checkpoints: tuple[str, ...]
    """Names of its checkpoints, also of uncommitted ones, newest first."""
    document: Run | None = None
    """``run.json``; ``None``: there is none, or it cannot be read."""
    is_run: bool = True
    """False: a folder without checkpoints and without the document of a run; there may be runs below it."""


class Listing(Documents):
    """Lists what a prefix has."""

    async def folders(self, below: str = "") -> list[str]:
        """Return the names of the folders at the top, or below another one, in any order; what a probe left is none."""
        found = await self._executor.persistently(lambda: list(self._store.list_folders(below)))
        return [name for name in found if keys.folder(name) != keys.PROBE]

    async def run(self, folder: str = "", folders: Sequence[str] | None = None) -> ListedRun | None:
        """Return the run that a prefix holds; ``None``: neither checkpoints nor the document of a run are there.

        ``folder``: its name; empty: the prefix of the store. ``folders``: those below it, if they are known.
        """
        below = keys.folder(folder) if folder else ""
        names = newest_first(await self.folders(below) if folders is None else folders, and_final=True)
        try:
            found = await self._executor.persistently(read, self._store, below)
        except (NotFound, ConfigurationError, UnreadableRun):  # none, another program's, or damaged
            return ListedRun(folder, tuple(names)) if names else None
        return ListedRun(folder, tuple(names), found)

    async def runs(self, folders: Iterable[str]) -> list[ListedRun]:
        """Return what each folder holds, in order of their names; a folder that holds no run has no checkpoints."""
        names = sorted(folders)
        found = await self._executor.together([self.run(name) for name in names])
        return [run or ListedRun(name, (), is_run=False) for name, run in zip(names, found, strict=True)]

    async def checkpoints(
        self,
        folders: Sequence[str] = (),
        *,
        newest: int | None = None,
        with_commits: bool = False,
        on_read: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[ListedCheckpoint]:
        """Return the checkpoints, newest first.

        Args:
            folders: The names of the top-level folders, from which ``newest`` chooses.
            newest: Only as many; ``None``: all that the prefix has, also beyond ``folders``.
            with_commits: Read the commit of each.
            on_read: Called with the number of commits that were read, and that are to be read.
        """
        if newest is None:
            found = summaries(await self._all_objects())
        else:
            names = newest_first(folders, and_final=True)[:newest]
            found = summaries(await self._objects_below([keys.folder(name) for name in names]))
        chosen = [found[name] for name in newest_first(found, and_final=True)]
        wanted = [s for s in chosen if s.is_committed and (with_commits or s.quarantines)]
        read = 0

        async def commit(name: str) -> ListedCheckpoint:
            nonlocal read
            listed = await self._with_commit(found[name])
            read += 1
            on_read(read, len(wanted))
            return listed

        known = {c.summary.name: c for c in await self._executor.together([commit(s.name) for s in wanted])}
        return [known.get(s.name) or ListedCheckpoint(s, s.state) for s in chosen]

    async def _with_commit(self, summary: Summary) -> ListedCheckpoint:
        try:
            stored = await self.stored_commit(summary.name)
        except UnusableNow:
            return ListedCheckpoint(summary, StoredState.UNREADABLE)
        if stored is None:
            return ListedCheckpoint(summary, StoredState.INCOMPLETE)
        if stored.commit is None:
            return ListedCheckpoint(summary, StoredState.UNREADABLE, stored)
        is_quarantined = bool(summary.quarantines) and await self.is_quarantined(summary.name, stored.crc64nvme)
        return ListedCheckpoint(summary, StoredState.BAD if is_quarantined else StoredState.COMMITTED, stored)

    async def _all_objects(self) -> list[tuple[str, int, str]]:
        """Return the objects of all checkpoints. A short listing is one request, and one for ``final``."""
        steps, final = await self._executor.together(
            [
                self._executor.persistently(self._objects, keys.STEPS, most=FEW_OBJECTS),
                self._executor.persistently(self._objects, keys.folder(FINAL)),
            ]
        )
        if len(steps) >= FEW_OBJECTS:
            steps = await self._objects_below([f"{keys.STEPS}{digit}" for digit in _DIGITS])
        return steps + final

    async def _objects_below(self, prefixes: Sequence[str]) -> list[tuple[str, int, str]]:
        pages = await self._executor.together([self._executor.persistently(self._objects, prefix) for prefix in prefixes])
        return [each for page in pages for each in page]

    def _objects(self, prefix: str, *, most: int | None = None) -> list[tuple[str, int, str]]:
        return [(stored.key, stored.size_bytes, stored.modified) for stored in islice(self._store.list(prefix), most)]
