"""Watch over the pod that holds a prefix: is it terminating, alive or silent? It claims nothing."""

from __future__ import annotations

import contextlib

import structlog

from sidecar.core.lifecycle.fencing import waits_for_ending
from sidecar.core.lifecycle.prefix_ownership import SILENCE_S, Ownership, Run, gave_sign, may_hold
from sidecar.errors import UnreadableRun
from sidecar.lifecycle.prefix_lease import PrefixLease
from sidecar.lifecycle.run_document import UNREADABLE_PAUSE_S, UNREADABLE_TRIES

log = structlog.get_logger()

TICK_S = 1.0
"""Interval in seconds at which ``run.json`` is read."""
ASK_AGAIN_S = SILENCE_S / 2
"""Seconds after which a holder that is silent is asked again: its answer to an earlier request may have removed this one."""
MOST_ROUND_S = 2 * TICK_S
"""Maximum seconds of silence that one reading counts, even if the answer of the store took longer."""
UPLOAD_S = 2.0
"""Seconds that a terminating pod must have left for its upload, once it is known that the holder is silent."""
_HELD_HINT = (
    f"uploads and resumes wait until its holder has been silent for {SILENCE_S:.0f} s; "
    "a later pod of the same CKPT_RUN_ID or Kubernetes job does not wait"
)


class HolderWatch:
    """Reads ``run.json``, and asks its holder for a sign of life."""

    def __init__(self, lease: PrefixLease) -> None:
        self._lease, self._documents = lease, lease.documents
        self._executor, self._deadline, self._clock = lease.executor, lease.deadline, lease.clock
        self._read_s = 0.0
        """Longest time of a read of ``run.json`` in seconds."""
        self._silent: Run | None = None
        """The run whose holder has been silent for ``SILENCE_S`` after a request."""
        self.waits_for: str | None = None
        """What this pod waits for at this moment, as a sentence; ``None``: for nothing."""

    async def wait_for_ending(self) -> None:
        """Wait while an earlier pod that is terminating may still commit; at most until its own deadline.

        What it commits is what this pod resumes from. A pod that is told to end itself waits for half of its time: it may have
        something to send, but most often it has nothing yet, and a take-over would cost the earlier pod its last checkpoint.

        Raises:
            UnreadableRun: ``run.json`` is not this system's any more.
        """
        first = run = await self.read_run()
        began_s = seen_s = self._clock.monotonic()
        own_until_s: float | None = None
        while True:
            now_s, left_s = self._clock.monotonic(), self._deadline.left_s()
            if left_s is not None and own_until_s is None:
                own_until_s = now_s + left_s / 2
            if own_until_s is not None and now_s >= own_until_s:
                break
            watched_s, silent_s = now_s - began_s, now_s - seen_s
            me, read_s = self._lease.holder.name, self._read_s
            if not waits_for_ending(first, run, me=me, watched_s=watched_s, silent_s=silent_s, read_s=read_s):
                break
            if self.waits_for is None:
                self.waits_for = f"an earlier pod of this job ({run.holder}) is terminating and may still commit"
                log.info("waits_for_earlier_pod", holder=run.holder, at_most_s=run.ends_in_s)
            await self._clock.sleep(TICK_S)
            before, run = run, await self.read_run()
            seen_s = seen_s if run.beat == before.beat else self._clock.monotonic()
        if self.waits_for is not None:
            log.info("earlier_pod_ended", holder=run.holder, waited_s=round(self._clock.monotonic() - began_s, 1))
        self.waits_for = None

    async def ownership(self, *, job: str | None) -> Ownership:
        """Ask the holder for a sign of life, unless it is known to be of ``job``.

        Returns:
            ``OURS``: it is dead, or of the job. ``TWO_AT_ONCE``: it is alive. ``WATCH``: this pod is told to end, and its time
            is too short to know it.
        """
        first = run = await self.read_run()
        began_s: float | None = None
        asks = 0
        while True:
            watched_s = 0.0 if began_s is None else self._clock.monotonic() - began_s
            found = may_hold(first, run, me=self._lease.holder.name, job=job, watched_s=watched_s)
            if found is not Ownership.WATCH or self._deadline.is_within(SILENCE_S - watched_s + UPLOAD_S):
                break
            if began_s is None:
                log.info("prefix_was_held", holder=run.holder, hint=_HELD_HINT)
                self.waits_for = f"whether the pod that held the prefix ({run.holder}) is alive"
            if began_s is None or watched_s >= asks * ASK_AGAIN_S:
                await self._ask()
                asks, began_s = asks + 1, self._clock.monotonic() - watched_s
            round_s = self._clock.monotonic()
            await self._clock.sleep(TICK_S)
            run = await self.read_run()
            # While the store answers nobody, a holder cannot give a sign.
            began_s += max(0.0, self._clock.monotonic() - round_s - MOST_ROUND_S)
        self.waits_for = None
        if began_s is not None and found is Ownership.OURS:
            self._silent = None if run.ending or gave_sign(first, run) else run
            await self._executor.persistently(self._documents.answered)
        return found

    async def was_silent(self) -> bool:
        """Whether the holder is the one that ``ownership`` found silent, and has given no sign of life since."""
        return await self.read_run() == self._silent

    async def is_silent(self) -> bool:
        """Whether the holder gives no sign of life on request; also ``False`` if this pod's time is too short to know it."""
        first = await self.read_run()
        if first == self._silent:
            return True
        if self._deadline.is_within(SILENCE_S + UPLOAD_S):
            return False
        for tick in range(round(SILENCE_S / TICK_S)):
            if tick % round(ASK_AGAIN_S / TICK_S) == 0:
                await self._ask()
            await self._clock.sleep(TICK_S)
            if gave_sign(first, await self.read_run()):
                return False
        return True

    async def _ask(self) -> None:
        await self._executor.persistently(self._documents.ask, self._lease.holder.name)

    async def read_run(self) -> Run:
        """Return the run in the store, at the second or third try if the document cannot be read.

        Raises:
            UnreadableRun: It is not this system's.
        """
        for _ in range(UNREADABLE_TRIES - 1):
            with contextlib.suppress(UnreadableRun):  # perhaps damaged in transit, or about to be written again by its holder
                return await self._timed_read()
            await self._clock.sleep(UNREADABLE_PAUSE_S)
        return await self._timed_read()

    async def _timed_read(self) -> Run:
        began_s = self._clock.monotonic()
        run = await self._executor.persistently(self._documents.read_run)
        self._read_s = max(self._read_s, self._clock.monotonic() - began_s)
        return run
