"""Renewal of the lease: the holder's signs of life, and its release; on the other nodes, what the holder has declared."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import replace

import structlog

from sidecar.core.lifecycle.fencing import ENDING_BEAT_S
from sidecar.core.lifecycle.prefix_ownership import ASK_POLL_S, CHECK_S, Run
from sidecar.errors import Fenced, StoreError
from sidecar.lifecycle.holder_watch import TICK_S
from sidecar.lifecycle.prefix_lease import PrefixLease
from sidecar.tasks import within

log = structlog.get_logger()


class Renewal:
    """Keeps a lease that ``TakeOver`` got, and gives it back."""

    def __init__(self, lease: PrefixLease) -> None:
        self._lease, self._documents = lease, lease.documents
        self._executor, self._deadline, self._clock = lease.executor, lease.deadline, lease.clock
        self._told_ending = False
        """Whether ``run.json`` says that this pod is terminating."""
        self._beat_s = 0.0
        """Longest time between two signs of life of this pod while it is terminating, in seconds, as far as it is known."""
        self._woken = asyncio.Event()

    async def keep(self) -> None:
        """Renew the lease until cancelled, or until this pod is fenced. Writes on changes and on requests for a beat."""
        failures, failed_at = 0, 0
        for tick in itertools.count(1):
            await within(TICK_S, self._woken.wait())
            self._woken.clear()
            try:
                if not self._lease.fenced.is_set():
                    await self.renew(tick)
            except Fenced:  # said by those who wait for ``fenced``
                continue
            except StoreError as error:
                failures = failures + 1 if tick - failed_at <= 2 * CHECK_S else 1
                failed_at = tick
                # The 1st, 2nd, 4th, 8th, and none while the log says of the store itself that it is away.
                if failures.bit_count() == 1 and not self._executor.waits_for_store:
                    log.warning("no_heartbeat", error=str(error), failures=failures)

    async def renew(self, tick: int) -> None:
        """Do what is due ``tick`` seconds after the start: declare the attempt, look for a later pod, give a sign of life.

        Raises:
            Fenced: A later pod of the job has taken the prefix over.
            StoreError: The store cannot be asked now, or ``run.json`` is not this system's.
        """
        is_ending = self._deadline.is_set()
        is_news = is_ending is not self._told_ending
        beats = is_news or (is_ending and tick % round(ENDING_BEAT_S / TICK_S) == 0)
        if beats:  # first: a later pod waits for it
            await self._give_sign(even_if_same=True)
        if (attempt := self._lease.pod.present_attempt()) is not None:
            await self._lease.reason_not_to_upload(None, attempt)  # before the first checkpoint: the other nodes wait for it
        asked = tick % ASK_POLL_S == 0 and await self._executor.once(self._documents.is_asked)
        if not beats and (asked or tick % CHECK_S == 0):
            await self._give_sign(even_if_same=asked)
        if asked and self._lease.claim is not None:
            await self._executor.once(self._documents.answered)

    async def _give_sign(self, *, even_if_same: bool) -> None:
        """Look for a later pod, and write ``run.json`` if it has changed or ``even_if_same``."""
        lease = self._lease
        async with lease.writes:
            began_s = self._clock.monotonic()
            run = await self._executor.once(lease.read_run)
            if lease.claim is not None and run.epoch > lease.claim.epoch:
                run = await self._executor.once(lease.read_run)  # nothing shows that an encrypted document was damaged
                if run.epoch > lease.claim.epoch:
                    raise await lease.fence()
            if lease.claim is None or lease.is_released:
                return
            # A late write of this pod's earlier life may have hidden them.
            is_late = run.epoch != lease.claim.epoch or not set(lease.attempts.declared) <= set(run.attempts)
            if even_if_same or is_late or self._documents.is_missing or run.holder != lease.holder.name:
                await lease.require_highest_claim()
                # The write takes about as long as what came before it.
                before_s = self._beat_s if self._told_ending else 0.0
                self._beat_s = max(before_s, ENDING_BEAT_S + 2 * (self._clock.monotonic() - began_s))
                await self._executor.once(self.beat, run)

    def beat(self, run: Run) -> None:
        """Write ``run.json`` as the holder, as a sign of life. Blocks."""
        held = self._held(run)
        self._documents.write(held)
        self._told_ending = held.ending

    def _held(self, run: Run) -> Run:
        """Return the run as its document says that this pod holds it."""
        lease, left_s = self._lease, self._deadline.left_s()
        assert lease.claim is not None
        return replace(
            run,
            holder=lease.holder.name,
            job=run.job or lease.holder.job,
            beat=run.beat + 1,
            ending=left_s is not None,
            ends_in_s=None if left_s is None else round(max(0.0, left_s), 1),
            beat_s=None if left_s is None else round(self._beat_s, 1),
            epoch=lease.claim.epoch,
            attempts=lease.attempts.declared,
        )

    async def learn_epochs(self) -> None:
        """Learn the epoch of each attempt of the trainer until cancelled, on a node above 0: before its first checkpoint."""
        while True:
            attempt, node = self._lease.pod.present_attempt(), self._lease.node
            if attempt is not None and attempt not in self._lease.attempts.epochs:
                with contextlib.suppress(StoreError, Fenced):
                    await self._lease.reason_not_to_upload(node, attempt, until_declared=True)
            await self._clock.sleep(max(ASK_POLL_S, node.count / 1000))

    def wake(self) -> None:
        """Look at once: the pod has got a termination notice."""
        self._woken.set()

    async def release(self) -> None:
        """Say that this pod, which is terminating, commits nothing any more: a later one need not wait for it.

        Raises:
            Fenced: A later pod has taken the prefix over: its ``run.json`` stays.
            StoreError: It could not be said.
        """
        lease = self._lease
        if lease.claim is None or not self._deadline.is_set():
            return
        lease.is_released = True
        async with lease.writes:
            run, _ = await self._executor.together((self._executor.once(lease.read_run), lease.require_highest_claim()))
            await self._executor.once(self._documents.write, replace(self._held(run), ends_in_s=None))

    async def release_within(self, seconds: float) -> None:
        """Do as ``release``, for at most this time; a failure costs a later pod some seconds."""
        with contextlib.suppress(Fenced, StoreError):
            await within(seconds, self.release())
