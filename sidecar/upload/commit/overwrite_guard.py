"""Keeps an older attempt from writing over what a later one has committed meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from sidecar.errors import Stopped
from sidecar.repository.documents import StoredCommit
from sidecar.upload.commit.committer import Committer
from trainer_hook.contract import Node

LOOK_S = 2.0
"""Longest time for which the latest look at the commit counts."""


class Outdated(Stopped):
    """Another writing of the step was committed while this one was being sent."""


class OverwriteGuard:
    """Of one upload of one checkpoint. The keys of its files are shared by all attempts, so it looks again and again.

    Make it before the first look at the commit: it counts from then on.
    """

    def __init__(
        self,
        committer: Committer,
        name: str,
        attempt: str,
        save_id: str | None = None,
        *,
        node: Node | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._committer = committer
        self._name = name
        self._writing = attempt, save_id
        self._node = node
        self._clock = clock
        self._looked_s = clock()
        self._looking = asyncio.Lock()

    async def pass_through(self) -> None:
        """Return if the step is still ours to write.

        Raises:
            Outdated: It is not.
            Fenced: A later pod of the job has taken the prefix over.
        """
        async with self._looking:
            if self._clock() - self._looked_s < LOOK_S:
                return
            asked_s = self._clock()  # before, not after: the answer may take its time
            await self._committer.fence.require_held(self._node, self._writing[0] or None)
            there = await self._committer.stored_commit(self._name)
            if there is not None and not self._is_ours(there):
                raise Outdated(f"another writing of {self._name} was committed meanwhile")
            self._looked_s = asked_s

    def _is_ours(self, there: StoredCommit) -> bool:
        return there.commit is not None and (there.commit.attempt, there.commit.save_id) == self._writing
