"""Keeps an older attempt from writing over what a later one has committed meanwhile."""

from __future__ import annotations

import asyncio
import time

from sidecar.errors import Stopped
from sidecar.upload.committing import Committer

LOOK_S = 2.0
"""Longest time for which the latest look at the commit counts."""


class Outdated(Stopped):
    """Another attempt committed the step while this one was sending it."""


class Fence:
    """Of one upload of one checkpoint. The keys of its files are shared by all attempts, so it looks again and again."""

    def __init__(self, committer: Committer, name: str, attempt: str) -> None:
        self._committer = committer
        self._name = name
        self._attempt = attempt
        self._looked_s = time.monotonic()
        self._looking = asyncio.Lock()

    async def pass_through(self) -> None:
        """Return if the step is still ours to write.

        Raises:
            Outdated: It is not.
        """
        async with self._looking:
            if time.monotonic() - self._looked_s < LOOK_S:
                return
            there = await self._committer.standing(self._name)
            if there is not None and (there.commit is None or there.commit.attempt != self._attempt):
                raise Outdated(f"{self._name} was committed by another attempt meanwhile")
            self._looked_s = time.monotonic()
