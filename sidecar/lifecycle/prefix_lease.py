"""Lease of a prefix, one run each: ``run.json`` at the store's root names its run and its present holder."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, replace

import structlog

from sidecar.core.format import keys
from sidecar.core.lifecycle.prefix_ownership import (
    ASK_POLL_S,
    CHECK_S,
    Ownership,
    Run,
    belongs,
    is_of_another,
    may_hold,
    why_not,
    with_attempt,
)
from sidecar.errors import AlreadyExists, ConfigurationError, NotFound, OversizedDocument, StoreError
from sidecar.store.protocol import Store
from sidecar.transfer.executor import StoreExecutor
from trainer_hook.contract import FORMAT, Node, encode_json

log = structlog.get_logger()

TICK_S = 1.0
MAX_RUN_BYTES = 1 << 20
"""Maximum size of ``run.json`` and ``run-asked.json``: enough for thousands of attempts."""
UNKNOWN = Node(1, 2)
"""Substitute for one of several nodes whose index only the markers contain."""


def claim(store: Store, *, run_id: str | None, job: str | None = None) -> Run:
    """Return the run that owns the prefix; create it if there is none. Blocks.

    Args:
        store: The opened store.
        run_id: The run that this pod belongs to; ``None``: the run of its job, else any.
        job: Namespace and name of the pod's job; ``None``: unknown.

    Raises:
        ConfigurationError: The prefix belongs to another run or job, or its ``run.json`` cannot be read.
    """
    try:
        return _checked(store, _read(store), run_id, job)
    except NotFound:
        mine = Run(run_id or uuid.uuid4().hex[:12], job)
        try:
            store.put(keys.RUN, _encode(mine), only_if_absent=True)
        except AlreadyExists:  # another node created it first
            return _checked(store, _read(store), run_id, job)
        return mine


class PrefixLease:
    """A pod's share of the lease. Node 0 holds it for all nodes and declares its attempts; the others accept those alone."""

    def __init__(
        self,
        store: Store,
        executor: StoreExecutor,
        run: Run,
        *,
        me: str,
        node: Node | None,
        job: str | None,
        going: Callable[[], bool],
        attempt: Callable[[], str | None],
    ) -> None:
        """Start with the run that ``claim`` returned. ``attempt``: the trainer's present attempt, if known."""
        self._store = store
        self._run = run
        self._executor = executor
        self._me = me
        self._node = node or UNKNOWN
        self._job = job
        self._going = going
        self._attempt = attempt
        self._writes = asyncio.Lock()
        self._own: set[str] = set()
        """Attempts that are known to be this run's."""
        self._said_ending = False
        self._is_missing = False
        """Whether ``run.json`` was deleted."""

    async def settle(self) -> None:
        """Wait until this pod may write below the prefix: at once, or after a dead holder's silence.

        Raises:
            ConfigurationError: Another job holds the prefix.
        """
        first = run = await self._executor.persistently(self._look)
        began_s: float | None = None
        while True:
            watched_s = 0.0 if began_s is None else time.monotonic() - began_s
            match may_hold(first, run, me=self._me, job=self._job, watched_s=watched_s):
                case Ownership.TWO_AT_ONCE:
                    raise ConfigurationError(
                        f"{self._store.url} is being written by another job ({run.job or run.holder}) at this moment: give "
                        "each run its own prefix in CKPT_STORE. Is it an earlier pod of this job? Then end it. Is it another "
                        "node of this job? Then set CKPT_NODE_INDEX and CKPT_NODE_COUNT"
                    )
                case Ownership.OURS:
                    break
            if self._going():  # after a termination notice, this pod's checkpoints matter more than the check
                break
            if began_s is None:
                log.info("prefix_was_held", holder=run.holder, hint="uploads begin when its holder has been silent for a while")
                await self._executor.persistently(self._ask)
                began_s = time.monotonic()
            await asyncio.sleep(TICK_S)
            run = await self._executor.persistently(self._look)
        await self._executor.persistently(self._beat, run)
        if began_s is not None:
            await self._executor.persistently(self._store.delete, [keys.ASKED])

    async def keep(self) -> None:
        """Renew the lease until cancelled, or until another pod holds it. Writes on changes and on requests for a beat."""
        for tick in itertools.count(1):
            await asyncio.sleep(TICK_S)
            try:
                if (attempt := self._attempt()) is not None:
                    await self.objection(None, attempt)  # before the first checkpoint: the other nodes wait for it
                is_news = self._going() is not self._said_ending
                asked = tick % ASK_POLL_S == 0 and await self._executor.once(self._is_asked)
                if not (is_news or asked or tick % CHECK_S == 0):
                    continue
                async with self._writes:
                    run = await self._executor.once(self._look)
                    if is_of_another(run, me=self._me):
                        break
                    if is_news or asked or self._is_missing or run.holder != self._me:
                        await self._executor.once(self._beat, run)
                if asked:
                    await self._executor.once(self._store.delete, [keys.ASKED])
            except (StoreError, ConfigurationError) as error:
                log.warning("no_heartbeat", error=str(error))
        log.error("prefix_taken_over", holder=self._run.holder, hint="a later pod of this job, or another job")
        await asyncio.Event().wait()

    async def objection(self, node: Node | None, attempt: str) -> str | None:
        """Return why a checkpoint must not be written yet, or ``None``. Node 0 first declares the attempt its own.

        Args:
            node: Node of the checkpoint; ``None``: this pod's.
            attempt: Attempt of the checkpoint.

        Pods of a Kubernetes job need no check: another job is refused by its name.

        Raises:
            StoreError: The store cannot be asked now.
        """
        node = node or self._node
        if node.count == 1 or self._job is not None or attempt in self._own:
            return None
        async with self._writes:
            run = await self._executor.once(self._look)
            reason = why_not(run, me=self._me, index=node.index, attempt=attempt)
            if reason is not None:
                return reason
            if attempt not in run.attempts:
                await self._executor.once(self._write, with_attempt(run, attempt))
            self._own.add(attempt)
        return None

    def _look(self) -> Run:
        """Return the run in the store; if it was deleted, the last known one, which is then written again."""
        try:
            self._run = _read(self._store)
        except NotFound:
            self._is_missing = True
            log.warning(
                "run_document_missing", key=keys.RUN, hint="it is written again; nothing but this system should delete it"
            )
        return self._run

    def _beat(self, run: Run) -> None:
        held = replace(run, holder=self._me, job=run.job or self._job, beat=run.beat + 1, ending=self._going())
        self._write(held)
        self._said_ending = held.ending

    def _write(self, run: Run) -> None:
        self._store.put(keys.RUN, _encode(run))
        self._run, self._is_missing = run, False

    def _ask(self) -> None:
        self._store.put(keys.ASKED, encode_json({"format": FORMAT, "by": self._me}))

    def _is_asked(self) -> bool:
        try:
            return bool(self._store.get(keys.ASKED, most_bytes=MAX_RUN_BYTES))
        except NotFound:
            return False
        except OversizedDocument:  # not written by this system; it is deleted like an answered request
            return True


def _encode(run: Run) -> bytes:
    return encode_json({"format": FORMAT} | {name: value for name, value in asdict(run).items() if value})


def _read(store: Store) -> Run:
    try:
        raw = store.get(keys.RUN, most_bytes=MAX_RUN_BYTES)
        fields = json.loads(raw)
        job, holder, beat = fields.get("job"), fields.get("holder"), fields.get("beat", 0)
        run_id, ending = str(fields["run_id"]), bool(fields.get("ending"))
        attempts = tuple(str(attempt) for attempt in fields.get("attempts", ()))
        return Run(run_id, job and str(job), holder and str(holder), int(beat), ending, attempts)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        size = f" ({error.size_bytes} bytes)" if isinstance(error, OversizedDocument) else ""
        raise ConfigurationError(
            f"{store.url}/{keys.RUN} is not this system's{size}: choose an empty prefix in CKPT_STORE"
        ) from None


def _checked(store: Store, run: Run, run_id: str | None, job: str | None) -> Run:
    match belongs(run, run_id=run_id, job=job):
        case Ownership.OTHER_RUN:
            raise ConfigurationError(
                f"{store.url} belongs to run {run.run_id[:80]!r}, this pod is of run {run_id!r}: "
                "give each run its own prefix in CKPT_STORE"
            )
        case Ownership.OTHER_JOB:
            raise ConfigurationError(
                f"{store.url} belongs to job {run.job!r}, this pod is of job {job!r}: give each run its own prefix in "
                f"CKPT_STORE, or set CKPT_RUN_ID={run.run_id} to go on with that run"
            )
    return run
