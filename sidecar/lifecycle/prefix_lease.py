"""Lease of a prefix, one run each: its holder, and fencing by later pods of the job (``core/lifecycle/fencing``)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping
from dataclasses import replace

import structlog

from sidecar.core.lifecycle.fencing import ENDING_BEAT_S, Claim, Holder, fencing_claim, obsolete
from sidecar.core.lifecycle.prefix_ownership import ASK_POLL_S, CHECK_S, Ownership, Run, Seen, declared_later, refusal
from sidecar.errors import Fenced, StoreError, Undeclared, UnreadableRun
from sidecar.lifecycle.deadline import Deadline
from sidecar.lifecycle.known_attempts import KnownAttempts
from sidecar.lifecycle.lease_documents import LeaseDocuments, start_errors
from sidecar.lifecycle.take_over import TICK_S, TakeOver, two_at_once
from sidecar.lifecycle.termination import LeasedPod
from sidecar.store.protocol import Store
from sidecar.transfer.clock import Clock
from sidecar.transfer.executor import StoreExecutor
from trainer_hook.contract import Node

log = structlog.get_logger()

UNKNOWN = Node(1, 2)
"""Substitute for one of several nodes whose index only the markers contain."""
FIRST = Node(0, 2)
"""Substitute for the first node, where nothing but the markers contains their number."""


class PrefixLease:
    """A pod's ``Lease``. Node 0 holds it for all nodes and declares its attempts; the others accept those alone.

    Its state: the run as it was read or written last (``LeaseDocuments``), this pod as a holder and its claim, if it has taken
    the prefix over, and the declared attempts (``KnownAttempts``).
    """

    def __init__(
        self,
        store: Store,
        executor: StoreExecutor,
        pod: LeasedPod,
        deadline: Deadline,
        *,
        found_in: Mapping[str, int] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Start with a nameless run; ``begin`` the real one first. ``found_in``: scan that found each attempt first."""
        self._attempts = KnownAttempts(lambda: Seen(pod.present_attempt(), found_in or {}))
        self._executor = executor
        self._pod = pod
        self._deadline = deadline
        self._clock = clock or Clock()
        self._documents = LeaseDocuments(store, age_s=pod.age_s)
        self.begin(Run(""), Holder("", is_unique=False, node=None, job=None, run_id=None))
        self._claim: Claim | None = None
        """This pod's claim; ``None``: it has not taken the prefix over."""
        self._writes = asyncio.Lock()
        self._is_released = False
        """This pod commits nothing any more, and gives no further sign of life."""
        self._told_ending = False
        """Whether ``run.json`` says that this pod is terminating."""
        self._beat_s = 0.0
        """Longest time between two signs of life of this pod while it is terminating, in seconds, as far as it is known."""
        self._woken = asyncio.Event()
        self.fenced = asyncio.Event()
        """A later pod of the job has taken the prefix over: this one commits and deletes nothing any more."""

    def begin(self, run: Run, holder: Holder) -> None:
        """Take note of this pod, and of the run that ``run_document.claim`` returned."""
        self._documents.run, self._holder = run, holder
        self._take_over = TakeOver(self._documents, self._executor, self._deadline, holder, self._clock)

    @property
    def waits_for(self) -> str | None:
        """What the lease waits for at this moment, as a sentence; ``None``: for nothing."""
        return self._take_over.waits_for

    @property
    def _node(self) -> Node:
        return self._holder.node or (UNKNOWN if self._claim is None else FIRST)

    @property
    def fenced_by(self) -> str:
        """Who fenced this pod, as a sentence."""
        return f"a later pod of this job ({self._documents.run.holder or 'unknown'}) has taken {self._documents.url} over"

    @property
    def takes_over_at_once(self) -> bool:
        """Whether the holder, alive or not, is of the same run: this pod is the later one."""
        return self._holder.is_of(self._documents.run)

    @property
    def is_held(self) -> bool:
        """Whether this pod has taken the prefix over, and no later one has."""
        return self._claim is not None and not self.fenced.is_set()

    def epoch_of(self, attempt: str) -> int | None:
        """Return the epoch of this pod's checkpoints of an attempt; ``None``: unknown."""
        return self._attempts.epochs.get(attempt) or None if self._claim is None else self._claim.epoch

    def is_later(self, attempt: str, than: str) -> bool | None:
        """Whether an attempt is later than another one, as far as node 0 has declared them; ``None``: unknown."""
        declared = self._documents.run.attempts if self._claim is None else self._attempts.declared
        return declared_later(declared, attempt, than)

    def wake(self) -> None:
        """Look at once: the pod has got a termination notice."""
        self._woken.set()

    async def wait_for_ending(self) -> None:
        """Wait while an earlier pod that is terminating may still commit; see ``TakeOver.wait_for_ending``."""
        with start_errors():
            await self._take_over.wait_for_ending()

    async def settle(self) -> None:
        """Take the prefix over, if it is another pod's: at once from a pod of the same job, else once its holder is silent.

        If told to end too early to know that, it does not: another job may hold it (``settle_later``).

        Raises:
            ConfigurationError: Another job holds the prefix.
            Fenced: A later pod of this job holds it already.
        """
        with start_errors():
            if not self.takes_over_at_once:
                match await self._take_over.watch_holder(job=self._holder.job):
                    case Ownership.TWO_AT_ONCE:
                        raise two_at_once(self._documents.url, self._documents.run)
                    case Ownership.WATCH:
                        return
            claims = await self._take_over.claim()
            if claims is None:
                raise await self._fence()
            async with self._writes:
                await self._hold(claims)

    async def settle_later(self) -> None:
        """Take the prefix over if ``settle`` left it to a holder that may be alive, and the termination notice is withdrawn.

        Raises:
            ConfigurationError: As ``settle``.
        """
        with contextlib.suppress(Fenced):  # said by those who wait for ``fenced``
            while not self.is_held and not self.fenced.is_set():
                await self._clock.sleep(TICK_S)
                if not self._deadline.is_set():
                    await self.settle()

    async def _hold(self, claims: list[Claim]) -> None:
        """Write ``run.json`` as the holder, whose claim is the last one."""
        self._claim = claim = claims[-1]
        # This pod may have been cut off since its claim.
        run, _ = await self._executor.together((self._executor.persistently(self._look), self._require_highest_claim()))
        is_other = run.holder != self._holder.name
        if is_other and run.holder is not None:
            log.info("prefix_taken_over", earlier=run.holder, epoch=claim.epoch)
        self._attempts.declared = (self._attempts.take_over(run) if is_other else run).attempts
        await self._executor.persistently(self._beat, run)
        if old := obsolete(claims):
            with contextlib.suppress(StoreError):
                await self._executor.once(self._documents.delete_claims, old)

    async def keep(self) -> None:
        """Renew the lease until cancelled, or until this pod is fenced. Writes on changes and on requests for a beat."""
        failures, failed_at = 0, 0
        for tick in itertools.count(1):
            await self._rest(TICK_S)
            try:
                if not self.fenced.is_set():
                    await self.renew(tick)
            except Fenced:  # said by those who wait for ``fenced``
                continue
            except StoreError as error:
                failures = failures + 1 if tick - failed_at <= 2 * CHECK_S else 1
                failed_at = tick
                if failures.bit_count() == 1:  # the 1st, 2nd, 4th, 8th: an outage of a day must not fill the log
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
        if (attempt := self._pod.present_attempt()) is not None:
            await self.reason_not_to_upload(None, attempt)  # before the first checkpoint: the other nodes wait for it
        asked = tick % ASK_POLL_S == 0 and await self._executor.once(self._documents.is_asked)
        if not beats and (asked or tick % CHECK_S == 0):
            await self._give_sign(even_if_same=asked)
        if asked and self._claim is not None:
            await self._executor.once(self._documents.answered)

    async def _give_sign(self, *, even_if_same: bool) -> None:
        """Look for a later pod, and write ``run.json`` if it has changed or ``even_if_same``."""
        async with self._writes:
            began_s = self._clock.monotonic()
            run = await self._executor.once(self._look)
            if self._claim is not None and run.epoch > self._claim.epoch:
                raise await self._fence()
            if self._claim is None or self._is_released:
                return
            # A late write of this pod's earlier life may have hidden them.
            is_late = run.epoch != self._claim.epoch or not set(self._attempts.declared) <= set(run.attempts)
            if even_if_same or is_late or self._documents.is_missing or run.holder != self._holder.name:
                await self._require_highest_claim()
                # The write takes about as long as what came before it.
                before_s = self._beat_s if self._told_ending else 0.0
                self._beat_s = max(before_s, ENDING_BEAT_S + 2 * (self._clock.monotonic() - began_s))
                await self._executor.once(self._beat, run)

    async def learn_epochs(self) -> None:
        """Learn the epoch of each attempt of the trainer until cancelled, on a node above 0: before its first checkpoint."""
        while True:
            attempt, node = self._pod.present_attempt(), self._node
            if attempt is not None and attempt not in self._attempts.epochs:
                with contextlib.suppress(StoreError, Fenced):
                    await self.reason_not_to_upload(node, attempt, until_declared=True)
            await self._clock.sleep(max(ASK_POLL_S, node.count / 1000))

    async def release(self) -> None:
        """Say that this pod, which is terminating, commits nothing any more: a later one need not wait for it.

        Raises:
            Fenced: A later pod has taken the prefix over: its ``run.json`` stays.
            StoreError: It could not be said.
        """
        if self._claim is None or not self._deadline.is_set():
            return
        self._is_released = True
        async with self._writes:
            run, _ = await self._executor.together((self._executor.once(self._look), self._require_highest_claim()))
            await self._executor.once(self._documents.write, replace(self._held(run), ends_in_s=None))

    async def release_within(self, seconds: float) -> None:
        """Do as ``release``, for at most this time; a failure costs a later pod some seconds."""
        with contextlib.suppress(Fenced, StoreError, TimeoutError):
            async with asyncio.timeout(seconds):
                await self.release()

    async def reason_not_to_upload(self, node: Node | None, attempt: str, *, until_declared: bool = False) -> str | None:
        """Return why the files must not be sent yet, or ``None``; see ``Lease``. Node 0 first declares the attempt its own.

        Raises:
            Fenced: A later pod of the job has taken the prefix over. A node above 0 knows it if its attempt was declared once,
                or if it has left it for a later one.
            StoreError: The store cannot be asked now.
        """
        if self.fenced.is_set():
            raise Fenced(self.fenced_by)
        node = node or self._node
        if node.index > 0 and attempt in self._attempts.epochs:
            if until_declared:
                return await self.reason_not_to_commit(node, attempt)
            try:
                await self.require_not_fenced(node, attempt)
            except Undeclared as error:
                return str(error)
        claims_nothing = self._holder.node is None  # its index is in the markers alone
        if attempt in self._attempts.epochs or (node.count == 1 and (self._claim is not None or claims_nothing)):
            return None
        async with self._writes:
            run = await self._executor.once(self._look)
            reason = self._refusal(run, node, attempt, until_declared=until_declared)
            if reason is not None:
                if node.index > 0 and (later := self._attempts.left_for(attempt)) is not None:
                    raise Fenced(f"node 0 never declared attempt {attempt}, and this node has left it for {later}")
                return reason
            if node.count == 1:
                return None
            if node.index == 0 and attempt not in run.attempts:
                await self.require_not_fenced()
                if self._claim is not None:  # also over a late write of an earlier pod
                    run = replace(run, holder=self._holder.name, epoch=self._claim.epoch, attempts=self._attempts.declared)
                run = self._attempts.declare(run, attempt)
                self._attempts.declared = run.attempts  # also if the answer to the write is lost
                await self._executor.once(self._documents.write, run)
            if attempt in run.attempts:
                self._attempts.epochs[attempt] = run.epoch
        return None

    async def require_not_fenced(self, node: Node | None = None, attempt: str | None = None) -> None:
        """Return if no later pod of the job has taken the prefix over; see ``Lease``.

        Raises:
            Fenced: One has, or this pod has said that it has ended.
            Undeclared: Node 0 has not declared the attempt its own yet.
            UnreadableRun: ``run.json`` is not this system's at this moment.
        """
        if self.fenced.is_set():
            raise Fenced(self.fenced_by)
        if self._is_released:
            raise Fenced("this pod has ended: a later one need not wait for it any more")
        node = node or self._node
        if self._claim is not None:
            await self._require_highest_claim()
        elif node.index > 0 and attempt is not None:  # only node 0 has a claim; the others go by the attempts that it declares
            run = await self._executor.persistently(self._look)
            reason = self._refusal(run, node, attempt)
            if reason is not None and (waits := self._attempts.awaits_declaration(run, attempt)) is not None:
                raise Undeclared(waits)
            if reason is not None:
                raise Fenced(reason)

    async def reason_not_to_commit(self, node: Node, attempt: str) -> str | None:
        """Return why the commit of a checkpoint has to wait, or ``None``: it may be written now; see ``Lease``.

        A node above 0 waits until the present holder has declared the attempt: between its take-over and that, it decides what
        to resume, and a newer step of the earlier attempt must not be committed.

        Raises:
            Fenced: A later pod of the job has taken the prefix over.
        """
        if self._claim is not None or node.index == 0 or self.fenced.is_set():
            await self.require_not_fenced(node, attempt)
            try:
                return None if self._claim is not None else await self.reason_not_to_upload(node, attempt)
            except StoreError as error:
                return str(error)
        ask = self._executor.persistently
        try:
            run, claims = await self._executor.together((ask(self._look), ask(self._documents.claims)))
        except UnreadableRun as error:
            return str(error)
        claimed_epoch = claims[-1].epoch if claims else 0
        if (reason := self._attempts.awaits_declaration(run, attempt, claimed_epoch=claimed_epoch)) is not None:
            return reason
        if (reason := self._refusal(run, node, attempt)) is not None:
            raise Fenced(reason)
        self._attempts.epochs[attempt] = run.epoch
        return None

    async def _require_highest_claim(self) -> None:
        """Return if no claim fences this pod, which has one. Asked also before it writes ``run.json`` as the holder."""
        assert self._claim is not None
        claims = await self._executor.persistently(self._documents.claims)
        if fencing_claim(claims, self._claim) is not None:
            raise await self._fence()

    def _refusal(self, run: Run, node: Node, attempt: str, *, until_declared: bool = False) -> str | None:
        """Return why this pod may not write a checkpoint, as ``run.json`` alone says it, or ``None``. Asks no store."""
        job = None if until_declared and node.index > 0 else self._holder.job
        return refusal(run, me=self._holder.name, index=node.index, attempt=attempt, job=job)

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
        with contextlib.suppress(StoreError):
            await self._executor.once(self._documents.look)  # for its name
        self.fenced.set()
        return Fenced(self.fenced_by)

    def _look(self) -> Run:
        return self._documents.look(repairs=self._claim is not None)

    def _held(self, run: Run) -> Run:
        """Return the run as its document says that this pod holds it."""
        left_s = self._deadline.left_s()
        return replace(
            run,
            holder=self._holder.name,
            job=run.job or self._holder.job,
            beat=run.beat + 1,
            ending=left_s is not None,
            ends_in_s=None if left_s is None else round(max(0.0, left_s), 1),
            beat_s=None if left_s is None else round(self._beat_s, 1),
            epoch=self._claim.epoch if self._claim else run.epoch,
            attempts=self._attempts.declared if self._claim else run.attempts,
        )

    def _beat(self, run: Run) -> None:
        held = self._held(run)
        self._documents.write(held)
        self._told_ending = held.ending
