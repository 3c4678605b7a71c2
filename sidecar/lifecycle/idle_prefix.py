"""A prefix that no live run uses: asked for before a person writes below it, and checked before each commit and deletion."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from sidecar.core.lifecycle.fencing import Claim, waits_for_ending
from sidecar.core.lifecycle.prefix_ownership import SILENCE_S, Run
from sidecar.errors import ConfigurationError, Fenced, NotFound, RequestRefused, StoreError, UnreadableRun
from sidecar.lifecycle.lease import NoLease
from sidecar.lifecycle.lease_documents import LeaseDocuments
from sidecar.lifecycle.run_document import read
from sidecar.store.protocol import Store
from sidecar.transfer.executor import StoreExecutor
from trainer_hook.contract import Node

POLL_S = 0.5
"""Interval in seconds at which the holder's sign of life is looked for."""
ASKED_BY = "a person's command"


class IdlePrefix(NoLease):
    """Lease of a person's command. It claims nothing, so a run that starts meanwhile is not fenced: the command is.

    The holder is asked for a sign of life as by a second job (FORMAT.md, "Two jobs on one prefix"). From then on each check
    compares the claims and the run's document: any change shows that a run has begun to use the prefix.
    """

    def __init__(self, store: Store, executor: StoreExecutor) -> None:
        """Start without an answer; ``begin`` first."""
        self._store = store
        self._documents = LeaseDocuments(store)
        self._executor = executor
        self._seen: tuple[Run | None, Claim | None] = (None, None)

    async def begin(self, on_wait: Callable[[str, float], None] = lambda holder, seconds: None) -> None:
        """Make sure that no live run uses the prefix: at once if it has no holder, else once the holder is silent.

        ``on_wait``: called with the holder and the longest wait in seconds, before the wait.

        Raises:
            RequestRefused: A run is alive.
            UnreadableRun: ``run.json`` is not this system's.
            StoreError: A request failed.
        """
        self._seen = first, _ = await self._look()
        if first is None or first.holder is None or (first.ending and first.ends_in_s is None):
            return
        on_wait(first.holder, SILENCE_S)
        if not first.ending:
            await self._executor.persistently(self._documents.ask, ASKED_BY)
        try:
            await self._watch(first)
        finally:
            with contextlib.suppress(StoreError):
                await self._executor.once(self._documents.answered)

    async def _watch(self, first: Run) -> None:
        began_s = time.monotonic()
        while True:
            silent_s = time.monotonic() - began_s
            run, claim = await self._look()
            if (run, claim) != self._seen:
                raise RequestRefused(self._alive(run or first))
            if first.ending and not waits_for_ending(first, first, me="", watched_s=silent_s, silent_s=silent_s):
                return
            if not first.ending and silent_s >= SILENCE_S:
                return
            await asyncio.sleep(POLL_S)

    def _alive(self, run: Run) -> str:
        job = f" of job {run.job}" if run.job else ""
        return f"{self._store.url}: a run is using this prefix (pod {run.holder}{job}): wait until it has ended, or stop it"

    async def require_not_fenced(self, node: Node | None = None, attempt: str | None = None) -> None:
        """Return if the prefix is as it was when the holder was silent.

        Raises:
            Fenced: A run has begun to use it.
        """
        now = await self._look()
        if now != self._seen:
            holder = f" (pod {now[0].holder})" if now[0] is not None and now[0].holder else ""
            raise Fenced(f"{self._store.url}: a run{holder} has begun to use this prefix: nothing more is changed")

    async def _look(self) -> tuple[Run | None, Claim | None]:
        claims = await self._executor.persistently(self._documents.claims)
        try:
            run: Run | None = await self._executor.persistently(read, self._store)
        except NotFound:
            run = None
        except UnreadableRun as error:
            raise ConfigurationError(str(error)) from None
        # Attempts are declared by a live holder only, whose beat grows with it.
        return run and replace(run, attempts=()), claims[-1] if claims else None
