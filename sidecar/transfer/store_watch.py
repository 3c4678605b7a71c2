"""Asks the store for an answer: one request instead of all while it is away, and where the latest answer gets old."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from sidecar.core.format import keys
from sidecar.core.lifecycle.store_state import ask_in_s
from sidecar.core.schedule.backoff import delay_s
from sidecar.errors import CorruptObject, NotFound, OversizedDocument, StoreError
from sidecar.store.protocol import Store
from sidecar.transfer.executor import HURRIED_CAP_S, StoreExecutor

CAP_S = 10.0
"""Longest pause in seconds between two requests to a store that is away."""
TICK_S = 0.5
"""Interval in seconds at which the age of the latest answer is looked at."""


class StoreWatch:
    """Keeps ``Health`` up to date with one small request at a time. All others wait for its answer while the store is away."""

    def __init__(self, store: Store, executor: StoreExecutor, *, is_wanted: Callable[[], bool], grace_s: float) -> None:
        """``is_wanted``: whether the store's state matters now, because somebody trains or a checkpoint is to be sent."""
        self._store = store
        self._executor = executor
        self._health = executor.health
        self._is_wanted = is_wanted
        self._grace_s = grace_s

    async def run(self) -> None:
        """Watch until cancelled."""
        failures = 0
        self._health.is_watched = True
        try:
            while True:
                if self._health.is_away:
                    failures += 1
                    cap_s = HURRIED_CAP_S if self._executor.is_hurried else CAP_S
                    await self._executor.pause(delay_s(failures, random_0_1=random.random(), cap_s=cap_s))  # noqa: S311
                    await self._ask()
                    continue
                failures = 0
                if self._health.unreachable is not None or self._is_due():
                    await self._ask()
                await asyncio.sleep(TICK_S)
        finally:
            self._health.is_watched = False

    def _is_due(self) -> bool:
        if not self._is_wanted():
            return False
        is_busy = self._executor.in_flight > 0
        return ask_in_s(self._executor.evidence(), is_busy=is_busy, grace_s=self._grace_s) <= 0

    async def _ask(self) -> None:
        """Read the smallest document that every store of a run has. Any answer will do, also that there is none."""
        is_answered = False
        self._health.asking()
        try:
            await self._executor.once(self._store.get, keys.RUN)
            is_answered = True
        except (NotFound, OversizedDocument, CorruptObject):
            is_answered = True
        except StoreError as error:
            self._health.failed(error, self)
        finally:
            self._health.asked(is_answered=is_answered)
        if is_answered:
            self._health.ended(self)
