"""Overwrite guard: an older attempt must not overwrite files that a later one has committed meanwhile."""

from __future__ import annotations

import asyncio

from sidecar.errors import Stopped
from sidecar.repository.documents import StoredCommit
from sidecar.transfer.clock import Clock
from sidecar.upload.commit.committer import Committer
from trainer_hook.contract import Node

VALID_S = 2.0
"""Seconds for which a read of the commit is valid."""


class Outdated(Stopped):
    """The step was committed while it was being sent, or its commit must not be replaced now: the upload starts again."""


class OverwriteGuard:
    """Guard of one upload of one checkpoint. All attempts share the keys of its files, so it reads the commit periodically.

    Create it before the caller reads the commit: that read counts as the guard's first one.
    """

    def __init__(
        self,
        committer: Committer,
        name: str,
        attempt: str,
        save_id: str | None = None,
        *,
        node: Node | None = None,
        caller_reads: bool = True,
        clock: Clock | None = None,
    ) -> None:
        """Guard one upload. ``caller_reads``: the caller reads the commit now; False: the guard does so at the first pass."""
        self._committer = committer
        self._name = name
        self._writing = attempt, save_id
        self._node = node
        self._clock = clock or Clock()
        self.repairs = True
        """The upload repairs a commit of the same save. If False, a commit of the same save makes the upload outdated, too."""
        self._checked_s = self._clock.monotonic() if caller_reads else float("-inf")
        self._checking = asyncio.Lock()

    async def pass_through(self, *, asks_now: bool = False) -> None:
        """Return if this attempt may still write the step. ``asks_now``: read the commit, regardless of ``VALID_S``.

        Raises:
            Outdated: It may not.
            Fenced: A later pod of the job has taken the prefix over.
        """
        async with self._checking:
            if not asks_now and self._clock.monotonic() - self._checked_s < VALID_S:
                return
            asked_s = self._clock.monotonic()  # taken before the request: the answer may be late
            await self._committer.lease.require_not_fenced(self._node, self._writing[0] or None)
            stored = await self._committer.stored_commit(self._name)
            if stored is not None and not self._is_ours(stored):
                raise Outdated(f"another save of {self._name} was committed meanwhile")
            if stored is not None and not self.repairs:
                raise Outdated(f"{self._name} was committed meanwhile, with an earlier sending of these files")
            self._checked_s = asked_s

    def _is_ours(self, stored: StoredCommit) -> bool:
        return stored.commit is not None and (stored.commit.attempt, stored.commit.save_id) == self._writing
