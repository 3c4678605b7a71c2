"""Lease of a prefix, one run each: its holder, and fencing by later pods of the job (``core/lifecycle/fencing``)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import structlog

from sidecar.core.format import keys
from sidecar.core.lifecycle.fencing import (
    ENDING_BEAT_S,
    Claim,
    Holder,
    Standing,
    claims_among,
    next_claim,
    obsolete,
    standing,
    waits_for_ending,
)
from sidecar.core.lifecycle.prefix_ownership import (
    ASK_POLL_S,
    CHECK_S,
    Ownership,
    Run,
    may_hold,
    why_not,
    with_attempt,
)
from sidecar.errors import ConfigurationError, Fenced, NotFound, OversizedDocument, StoreError
from sidecar.lifecycle.run_document import MAX_RUN_BYTES, encode, read
from sidecar.lifecycle.termination import Ending
from sidecar.store.protocol import Store
from sidecar.transfer.clock import Clock
from sidecar.transfer.executor import StoreExecutor
from trainer_hook.contract import FORMAT, Node, encode_json

log = structlog.get_logger()

TICK_S = 1.0
RELEASE_S = 0.25
"""Longest delay of the exit by releasing the lease."""
UNKNOWN = Node(1, 2)
"""Substitute for one of several nodes whose index only the markers contain."""
FIRST = Node(0, 2)
"""Substitute for the first node, where nothing but the markers contains their number."""


class PrefixLease:
    """A pod's share of the lease. Node 0 holds it for all nodes and declares its attempts; the others accept those alone."""

    def __init__(self, store: Store, executor: StoreExecutor, pod: Ending, *, clock: Clock | None = None) -> None:
        """Start without a run; ``begin`` it first."""
        self._store = store
        self._executor = executor
        self._pod = pod
        self._run = Run("")
        self._holder = Holder("", is_unique=False, node=None, job=None, run_id=None)
        self._clock = clock or Clock()
        self._claim: Claim | None = None
        """This pod's claim; ``None``: it has not taken the prefix over."""
        self._writes = asyncio.Lock()
        self._own: set[str] = set()
        """Attempts that are known to be this run's."""
        self._declared: tuple[str, ...] = ()
        """Attempts that this pod, as the holder, has declared its own: a late write of an earlier pod may hide them."""
        self._is_released = False
        """This pod commits nothing any more, and gives no further sign of life."""
        self._told_ending = False
        """Whether ``run.json`` says that this pod is terminating."""
        self._is_missing = False
        """Whether ``run.json`` was deleted."""
        self._woken = asyncio.Event()
        self.fenced = asyncio.Event()
        """A later pod of the job has taken the prefix over: this one commits and deletes nothing any more."""
        self.waits_for: str | None = None
        """What the lease waits for at this moment, as a sentence; ``None``: for nothing."""

    def begin(self, run: Run, holder: Holder) -> None:
        """Take note of this pod, and of the run that ``run_document.claim`` returned."""
        self._run, self._holder = run, holder

    @property
    def _node(self) -> Node:
        return self._holder.node or (UNKNOWN if self._claim is None else FIRST)

    @property
    def fenced_by(self) -> str:
        """Who fenced this pod, as a sentence."""
        return f"a later pod of this job ({self._run.holder or 'unknown'}) has taken {self._store.url} over"

    @property
    def takes_over_at_once(self) -> bool:
        """Whether the holder, alive or not, is known to be of the same run: this pod is the later one."""
        return self._holder.is_of(self._run)

    @property
    def is_held(self) -> bool:
        """Whether this pod has taken the prefix over, and no later one has."""
        return self._claim is not None and not self.fenced.is_set()

    def wake(self) -> None:
        """Look at once: the pod has got a termination notice."""
        self._woken.set()

    async def settle(self) -> None:
        """Take the prefix over, if it is another pod's: at once from a pod of the same job, else once its holder is silent.

        A pod that is told to end before that is known does not take it over: the holder may be another job's, and alive.

        Raises:
            ConfigurationError: Another job holds the prefix.
            Fenced: A later pod of this job holds it already.
        """
        if not self.takes_over_at_once:
            match await self._watch_holder(job=self._holder.job):
                case Ownership.TWO_AT_ONCE:
                    raise ConfigurationError(
                        f"{self._store.url} is being written by another job ({self._run.job or self._run.holder}) at this "
                        "moment: give each run its own prefix in CKPT_STORE. Is it an earlier pod of this job? Then set "
                        "CKPT_RUN_ID or JOB_NAME for both. Is it another node of this job? Then set CKPT_NODE_INDEX and "
                        "CKPT_NODE_COUNT"
                    )
                case Ownership.WATCH:
                    return
        await self._take_over()

    async def wait_for_ending(self) -> None:
        """Wait while an earlier pod that is terminating may still commit; at most until its own deadline.

        What it commits is what this pod resumes from. A pod that is told to end itself waits for half of its time: it may have
        something to send, but most often it has nothing yet, and a take-over would cost the earlier pod its last checkpoint.
        """
        first = run = await self._executor.persistently(self._look)
        began_s = seen_s = self._clock.monotonic()
        own_until_s: float | None = None
        while True:
            now_s, left_s = self._clock.monotonic(), self._pod.left_s()
            if left_s is not None and own_until_s is None:
                own_until_s = now_s + left_s / 2
            if own_until_s is not None and now_s >= own_until_s:
                break
            if not waits_for_ending(first, run, me=self._holder.name, watched_s=now_s - began_s, silent_s=now_s - seen_s):
                break
            if self.waits_for is None:
                self.waits_for = f"an earlier pod of this job ({run.holder}) is terminating and may still commit"
                log.info("waits_for_earlier_pod", holder=run.holder, at_most_s=run.ends_in_s)
            await self._clock.sleep(TICK_S)
            before, run = run, await self._executor.persistently(self._look)
            seen_s = seen_s if run.beat == before.beat else self._clock.monotonic()
        if self.waits_for is not None:
            log.info("earlier_pod_ended", holder=run.holder, waited_s=round(self._clock.monotonic() - began_s, 1))
        self.waits_for = None

    async def _watch_holder(self, *, job: str | None) -> Ownership:
        """Ask the holder for a sign of life, unless it is known to be of ``job``.

        Returns:
            ``OURS``: it is dead, or of the job. ``TWO_AT_ONCE``: it is alive. ``WATCH``: this pod is told to end before either
            is known.
        """
        first = run = await self._executor.persistently(self._look)
        began_s: float | None = None
        while True:
            watched_s = 0.0 if began_s is None else self._clock.monotonic() - began_s
            found = may_hold(first, run, me=self._holder.name, job=job, watched_s=watched_s)
            if found is not Ownership.WATCH or self._pod.left_s() is not None:
                break
            if began_s is None:
                log.info("prefix_was_held", holder=run.holder, hint="uploads begin when its holder has been silent for a while")
                self.waits_for = f"whether the pod that held the prefix ({run.holder}) is alive"
                await self._executor.persistently(self._ask)
                began_s = self._clock.monotonic()
            await self._clock.sleep(TICK_S)
            run = await self._executor.persistently(self._look)
        self.waits_for = None
        if began_s is not None and found is Ownership.OURS:
            await self._executor.persistently(self._store.delete, [keys.ASKED])
        return found

    async def _take_over(self) -> None:
        claims = await self._executor.persistently(self._claims)
        match standing(claims, self._holder.id):
            case Standing.HOLDER:
                claim = claims[-1]
            case Standing.FENCED if self._holder.is_unique or await self._watch_holder(job=None) is not Ownership.OURS:
                raise await self._fence()
            case _:
                run = await self._executor.persistently(self._look)
                claim = next_claim(claims, self._holder.id, known_epoch=run.epoch)
                await self._executor.persistently(self._store.put, claim.key, self._document())
                # Another pod may have claimed the same epoch at this moment.
                claims = await self._executor.persistently(self._claims)
                if standing(claims, self._holder.id) is not Standing.HOLDER:
                    raise await self._fence()
        self._claim = claim
        run = await self._executor.persistently(self._look)
        is_other = run.holder != self._holder.name
        if is_other and run.holder is not None:
            log.info("prefix_taken_over", earlier=run.holder, epoch=claim.epoch)
        self._declared = () if is_other else run.attempts
        await self._executor.persistently(self._beat, run)
        if old := obsolete(claims):
            with contextlib.suppress(StoreError):
                await self._executor.once(self._store.delete, [each.key for each in old])

    async def keep(self) -> None:
        """Renew the lease until cancelled, or until this pod is fenced. Writes on changes and on requests for a beat."""
        for tick in itertools.count(1):
            await self._rest(TICK_S)
            try:
                if not self.fenced.is_set():
                    await self.renew(tick)
            except Fenced:  # said by those who wait for ``fenced``
                continue
            except (StoreError, ConfigurationError) as error:
                log.warning("no_heartbeat", error=str(error))

    async def renew(self, tick: int) -> None:
        """Do what is due ``tick`` seconds after the start: declare the attempt, look for a later pod, give a sign of life.

        Raises:
            Fenced: A later pod of the job has taken the prefix over.
            StoreError: The store cannot be asked now.
            ConfigurationError: ``run.json`` is not this system's.
        """
        trainer = self._pod.trainer()
        if trainer is not None and trainer.attempt is not None:
            await self.objection(None, trainer.attempt)  # before the first checkpoint: the other nodes wait for it
        is_ending = self._pod.left_s() is not None
        is_news = is_ending is not self._told_ending
        beats = is_ending and tick % round(ENDING_BEAT_S / TICK_S) == 0
        asked = tick % ASK_POLL_S == 0 and await self._executor.once(self._is_asked)
        if not (is_news or asked or beats or tick % CHECK_S == 0):
            return
        async with self._writes:
            run = await self._executor.once(self._look)
            if self._claim is not None and run.epoch > self._claim.epoch:
                raise await self._fence()
            if self._claim is None:
                return
            if is_news or asked or beats or self._is_missing or run.holder != self._holder.name:
                await self.require_held()
                if self._is_released:
                    return
                await self._executor.once(self._beat, run)
        if asked:
            await self._executor.once(self._store.delete, [keys.ASKED])

    async def release(self) -> None:
        """Say that this pod, which is terminating, commits nothing any more: a later one need not wait for it.

        Raises:
            Fenced: A later pod has taken the prefix over: its ``run.json`` stays.
            StoreError: It could not be said.
            ConfigurationError: ``run.json`` is not this system's.
        """
        if self._claim is None or self._pod.left_s() is None:
            return
        self._is_released = True
        async with self._writes:
            asked: list[Coroutine[Any, Any, Any]] = [self._executor.once(self._look), self.require_held()]
            run, _ = await self._executor.together(asked)
            await self._executor.once(self._write, replace(self._held(run), ends_in_s=None))

    async def release_in_time(self) -> None:
        """Do as ``release``, for at most ``RELEASE_S`` seconds; a failure costs a later pod some seconds."""
        with contextlib.suppress(Fenced, StoreError, ConfigurationError, TimeoutError):
            async with asyncio.timeout(RELEASE_S):
                await self.release()

    async def require_held(self, node: Node | None = None, attempt: str | None = None) -> None:
        """Return if no later pod of the job has taken the prefix over. Ask it before each commit and each deletion.

        Args:
            node: Node of the checkpoint; ``None``: this pod's.
            attempt: Attempt of the checkpoint; ``None``: it is not about one.

        Raises:
            Fenced: One has.
        """
        if self.fenced.is_set():
            raise Fenced(self.fenced_by)
        node = node or self._node
        if self._claim is None:  # only node 0 has one; the others go by the attempts that it declares
            if node.index > 0 and attempt is not None:
                reason = self._why_not(await self._executor.persistently(self._look), node, attempt)
                if reason is not None:
                    raise Fenced(reason)
            return
        claims = await self._executor.persistently(self._claims)
        if claims and claims[-1] > self._claim:  # also if this pod's own claim was deleted
            raise await self._fence()

    async def objection(self, node: Node | None, attempt: str) -> str | None:
        """Return why a checkpoint must not be written yet, or ``None``. Node 0 first declares the attempt its own.

        Args:
            node: Node of the checkpoint; ``None``: this pod's.
            attempt: Attempt of the checkpoint.

        Raises:
            Fenced: A later pod of the job has taken the prefix over.
            StoreError: The store cannot be asked now.
        """
        if self.fenced.is_set():
            raise Fenced(self.fenced_by)
        node = node or self._node
        if node.count == 1 or attempt in self._own:
            return None
        async with self._writes:
            run = await self._executor.once(self._look)
            reason = self._why_not(run, node, attempt)
            if reason is not None:
                return reason
            if node.index == 0 and attempt not in run.attempts:
                await self.require_held()
                declaring = with_attempt(run if self._claim is None else replace(run, attempts=self._declared), attempt)
                await self._executor.once(self._write, declaring)
                self._declared = declaring.attempts
            self._own.add(attempt)
        return None

    def _why_not(self, run: Run, node: Node, attempt: str) -> str | None:
        return why_not(run, me=self._holder.name, index=node.index, attempt=attempt, job=self._holder.job)

    async def _rest(self, seconds: float) -> None:
        """Return after ``seconds``, or at once when woken."""
        woken = asyncio.create_task(self._woken.wait())
        resting = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait({woken, resting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            woken.cancel()
            resting.cancel()
        self._woken.clear()

    async def _fence(self) -> Fenced:
        """Take note that a later pod holds the prefix. Returns the error to raise."""
        with contextlib.suppress(StoreError, ConfigurationError):  # for its name
            await self._executor.once(self._look)
        self.fenced.set()
        return Fenced(self.fenced_by)

    def _look(self) -> Run:
        """Return the run in the store; if it was deleted, the last known one, which is then written again."""
        try:
            self._run = read(self._store)
        except NotFound:
            self._is_missing = True
            log.warning(
                "run_document_missing", key=keys.RUN, hint="it is written again; nothing but this system should delete it"
            )
        return self._run

    def _claims(self) -> list[Claim]:
        return claims_among(stored.key for stored in self._store.list(keys.CLAIMS))

    def _document(self) -> bytes:
        holder = self._holder
        return encode_json({"format": FORMAT, "holder": holder.name} | ({"job": holder.job} if holder.job else {}))

    def _held(self, run: Run) -> Run:
        """Return the run as its document says that this pod holds it."""
        left_s = self._pod.left_s()
        return replace(
            run,
            holder=self._holder.name,
            job=run.job or self._holder.job,
            beat=run.beat + 1,
            ending=left_s is not None,
            ends_in_s=None if left_s is None else round(max(0.0, left_s), 1),
            epoch=self._claim.epoch if self._claim else run.epoch,
            attempts=self._declared if self._claim else run.attempts,
        )

    def _beat(self, run: Run) -> None:
        held = self._held(run)
        self._write(held)
        self._told_ending = held.ending

    def _write(self, run: Run) -> None:
        self._store.put(keys.RUN, encode(run))
        self._run, self._is_missing = run, False

    def _ask(self) -> None:
        self._store.put(keys.ASKED, encode_json({"format": FORMAT, "by": self._holder.name}))

    def _is_asked(self) -> bool:
        try:
            return bool(self._store.get(keys.ASKED, most_bytes=MAX_RUN_BYTES))
        except NotFound:
            return False
        except OversizedDocument:  # not written by this system; it is deleted like an answered request
            return True
