"""Lease of a prefix, one run each: its holder, and fencing by later pods of the job (``core/lifecycle/fencing``)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import replace

from sidecar.core.lifecycle.fencing import Claim, Holder, fencing_claim
from sidecar.core.lifecycle.prefix_ownership import Run, declared_later, refusal
from sidecar.errors import Fenced, StoreError, Undeclared, UnreadableRun
from sidecar.lifecycle.deadline import Deadline
from sidecar.lifecycle.known_attempts import KnownAttempts
from sidecar.lifecycle.lease_documents import LeaseDocuments
from sidecar.lifecycle.pod import LeasedPod
from sidecar.store.protocol import Store
from sidecar.transfer.clock import Clock
from sidecar.transfer.executor import StoreExecutor
from trainer_hook.contract import Node

UNKNOWN = Node(1, 2)
"""Substitute for one of several nodes whose index only the markers contain."""
FIRST = Node(0, 2)
"""Substitute for the first node, where nothing but the markers contains their number."""


class PrefixLease:
    """A pod's ``Lease``. Node 0 holds it for all nodes and declares its attempts; the others accept those alone.

    ``TakeOver`` gets it, ``Renewal`` keeps it and gives it back; both share what it was made with.
    """

    def __init__(
        self,
        store: Store,
        executor: StoreExecutor,
        pod: LeasedPod,
        deadline: Deadline,
        found_in: Mapping[str, int],
        *,
        clock: Clock | None = None,
    ) -> None:
        """Start with a nameless run; ``begin`` the real one first. ``found_in``: scan that found each attempt first."""
        self.executor, self.pod, self.deadline, self.clock = executor, pod, deadline, clock or Clock()
        self.documents = LeaseDocuments(store)
        self.attempts = KnownAttempts(pod, found_in)
        self.holder = Holder("", is_unique=False, node=None, job=None, run_id=None)
        """This pod, as the documents name it."""
        self.claim: Claim | None = None
        """This pod's claim; ``None``: it has not taken the prefix over."""
        self.writes = asyncio.Lock()
        """Held from a reading of ``run.json`` to the write that depends on it."""
        self.is_released = False
        """This pod commits nothing any more, and gives no further sign of life."""
        self.fenced = asyncio.Event()
        """A later pod of the job has taken the prefix over: this one commits and deletes nothing any more."""

    def begin(self, run: Run, holder: Holder) -> None:
        """Take note of this pod, and of the run that ``run_document.claim`` returned."""
        self.documents.run, self.holder = run, holder

    @property
    def node(self) -> Node:
        """This pod's node, or a substitute while only the markers contain it."""
        return self.holder.node or (UNKNOWN if self.claim is None else FIRST)

    @property
    def fenced_by(self) -> str:
        """Who fenced this pod, as a sentence."""
        return f"a later pod of this job ({self.documents.run.holder or 'unknown'}) has taken {self.documents.url} over"

    @property
    def is_held(self) -> bool:
        """Whether this pod has taken the prefix over, and no later one has."""
        return self.claim is not None and not self.fenced.is_set()

    def epoch_of(self, attempt: str) -> int | None:
        """Return the epoch of this pod's checkpoints of an attempt; ``None``: unknown."""
        return self.attempts.epochs.get(attempt) or None if self.claim is None else self.claim.epoch

    def is_later(self, attempt: str, than: str) -> bool | None:
        """Whether an attempt is later than another one, as far as node 0 has declared them; ``None``: unknown."""
        declared = self.documents.run.attempts if self.claim is None else self.attempts.declared
        return declared_later(declared, attempt, than)

    async def reason_not_to_upload(self, node: Node | None, attempt: str, *, until_declared: bool = False) -> str | None:
        """Return why the files must not be sent yet, or ``None``; see ``Lease``. Node 0 first declares the attempt its own.

        Raises:
            Fenced: A later pod of the job has taken the prefix over. A node above 0 knows it if its attempt was declared once,
                or if it has left it for a later one.
            StoreError: The store cannot be asked now.
        """
        if self.fenced.is_set():
            raise Fenced(self.fenced_by)
        node = node or self.node
        if node.index > 0 and attempt in self.attempts.epochs:
            if until_declared:
                return await self.reason_not_to_commit(node, attempt)
            try:
                await self.require_not_fenced(node, attempt)
            except Undeclared as error:
                return str(error)
        claims_nothing = self.holder.node is None  # its index is in the markers alone
        if attempt in self.attempts.epochs or (node.count == 1 and (self.claim is not None or claims_nothing)):
            return None
        async with self.writes:
            run = await self.executor.once(self.read_run)
            reason = self._refusal(run, node, attempt, until_declared=until_declared)
            if reason is not None:
                if node.index > 0 and (later := self.attempts.later_attempt_than(attempt)) is not None:
                    raise Fenced(f"node 0 never declared attempt {attempt}, and this node has left it for {later}")
                return reason
            if node.count == 1:
                return None
            if node.index == 0 and attempt not in run.attempts:
                await self.require_not_fenced()
                if self.claim is not None:  # also over a late write of an earlier pod
                    run = replace(run, holder=self.holder.name, epoch=self.claim.epoch, attempts=self.attempts.declared)
                run = self.attempts.declare(run, attempt)
                self.attempts.declared = run.attempts  # also if the answer to the write is lost
                await self.executor.once(self.documents.write, run)
            if attempt in run.attempts:
                self.attempts.epochs[attempt] = run.epoch
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
        if self.is_released:
            raise Fenced("this pod has ended: a later one need not wait for it any more")
        node = node or self.node
        if self.claim is not None:
            await self.require_highest_claim()
        elif node.index > 0 and attempt is not None:  # only node 0 has a claim; the others go by the attempts that it declares
            run = await self.executor.persistently(self.read_run)
            reason = self._refusal(run, node, attempt)
            if reason is not None and (waits := self.attempts.awaits_declaration(run, attempt)) is not None:
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
        if self.claim is not None or node.index == 0 or self.fenced.is_set():
            await self.require_not_fenced(node, attempt)
            try:
                return None if self.claim is not None else await self.reason_not_to_upload(node, attempt)
            except StoreError as error:
                return str(error)
        ask = self.executor.persistently
        try:
            run, claims = await self.executor.together((ask(self.read_run), ask(self.documents.claims)))
        except UnreadableRun as error:
            return str(error)
        claimed_epoch = claims[-1].epoch if claims else 0
        if (reason := self.attempts.awaits_declaration(run, attempt, claimed_epoch=claimed_epoch)) is not None:
            return reason
        if (reason := self._refusal(run, node, attempt)) is not None:
            raise Fenced(reason)
        self.attempts.epochs[attempt] = run.epoch
        return None

    async def require_highest_claim(self) -> None:
        """Return if no claim fences this pod, which has one. Asked also before it writes ``run.json`` as the holder."""
        found = await self._fencing_claim()
        # A fenced pod ends its training, and nothing else shows that a listing was damaged in transit: two have to agree.
        while found is not None:
            before, found = found, await self._fencing_claim()
            if found == before:
                raise await self.fence()

    async def _fencing_claim(self) -> Claim | None:
        assert self.claim is not None
        return fencing_claim(await self.executor.persistently(self.documents.claims), self.claim)

    def _refusal(self, run: Run, node: Node, attempt: str, *, until_declared: bool = False) -> str | None:
        """Return why this pod may not write a checkpoint, as ``run.json`` alone says it, or ``None``. Asks no store."""
        job = None if until_declared and node.index > 0 else self.holder.job
        return refusal(run, me=self.holder.name, index=node.index, attempt=attempt, job=job)

    async def fence(self) -> Fenced:
        """Take note that a later pod holds the prefix. Returns the error to raise."""
        with contextlib.suppress(StoreError):
            await self.executor.once(self.documents.read_run)  # for its name
        self.fenced.set()
        return Fenced(self.fenced_by)

    def read_run(self) -> Run:
        """Return the run in the store; the holder writes it again if it was damaged. Blocks."""
        return self.documents.read_run(repairs=self.claim is not None)
