"""One run per prefix: ``run.json`` at the store's root says whose it is, and who holds it now."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, replace

import structlog

from sidecar.core import keys
from sidecar.core.tenancy import BEAT_S, Run, Verdict, belongs, may_hold
from sidecar.errors import AlreadyExists, ConfigurationError, NotFound, StoreError
from sidecar.store.protocol import Store
from sidecar.transfer import Transfers
from trainer_hook.contract import FORMAT, encode_json

log = structlog.get_logger()

LOOK_S = 1.0


def claim(store: Store, *, run_id: str | None, job: str | None = None) -> Run:
    """Return the run that owns the prefix, after writing it where there was none. Blocks.

    Args:
        store: The opened store.
        run_id: The run that this pod belongs to; ``None``: the one of its job, or whatever run is there.
        job: Namespace and name of the pod's job, where Kubernetes tells.

    Raises:
        ConfigurationError: The prefix belongs to another run or job, or its ``run.json`` cannot be read.
    """
    try:
        return _checked(store, _read(store), run_id, job)
    except NotFound:
        mine = Run(run_id or uuid.uuid4().hex[:12], job)
        try:
            store.put(keys.RUN, _encode(mine), only_if_absent=True)
        except AlreadyExists:  # another node was faster
            return _checked(store, _read(store), run_id, job)
        return mine


class Tenancy:
    """Node 0's hold on the prefix. Other nodes hold nothing: without node 0 nothing is committed."""

    def __init__(
        self, store: Store, transfers: Transfers, run: Run, *, me: str, job: str | None, going: Callable[[], bool]
    ) -> None:
        """``run`` is what ``claim`` returned."""
        self._store = store
        self._run = run
        self._transfers = transfers
        self._me = me
        self._job = job
        self._going = going

    async def settle(self) -> None:
        """Wait until this pod may write below the prefix: at once, or when a holder that died was silent for long enough.

        Raises:
            ConfigurationError: Another job holds it.
        """
        first = run = await self._transfers.persistently(self._look)
        began_s = time.monotonic()
        while True:
            watched_s = time.monotonic() - began_s
            match may_hold(first, run, me=self._me, job=self._job, watched_s=watched_s):
                case Verdict.TWO_AT_ONCE:
                    raise ConfigurationError(
                        f"{self._store.url} is being written by another job ({run.job or run.holder}) at this moment: give "
                        "each run its own prefix in CKPT_STORE. Is it an earlier pod of this job? Then end it"
                    )
                case Verdict.OURS:
                    break
            if self._going():  # what this pod has matters more now than who else is there
                break
            if not watched_s:
                log.info("prefix_was_held", holder=run.holder, hint="uploads begin when its holder has been silent for a while")
            await asyncio.sleep(LOOK_S)
            run = await self._transfers.persistently(self._look)
        await self._transfers.persistently(self._beat, run)

    async def keep(self) -> None:
        """Beat until cancelled, or until the prefix has another holder."""
        while True:
            said_ending = self._going()
            for _ in range(int(BEAT_S / LOOK_S)):
                await asyncio.sleep(LOOK_S)
                if self._going() and not said_ending:
                    break
            try:
                run = await self._transfers.once(self._look)
                if run.holder not in (None, self._me):
                    log.error("prefix_taken_over", holder=run.holder, hint="a later pod of this job, or another job")
                    await asyncio.Event().wait()
                await self._transfers.once(self._beat, run)
            except (StoreError, ConfigurationError) as error:
                log.warning("no_heartbeat", error=str(error))

    def _look(self) -> Run:
        """Return what the store says; when somebody removed that, what was known last: it is written again."""
        try:
            self._run = _read(self._store)
        except NotFound:
            log.warning(
                "run_document_missing", key=keys.RUN, hint="it is written again; nothing but this system should delete it"
            )
        return self._run

    def _beat(self, run: Run) -> None:
        held = replace(run, holder=self._me, job=run.job or self._job, beat=run.beat + 1, ending=self._going())
        self._store.put(keys.RUN, _encode(held))


def _encode(run: Run) -> bytes:
    return encode_json({"format": FORMAT} | {name: value for name, value in asdict(run).items() if value})


def _read(store: Store) -> Run:
    raw = store.get(keys.RUN)
    try:
        fields = json.loads(raw)
        job, holder, beat = fields.get("job"), fields.get("holder"), fields.get("beat", 0)
        run_id, ending = str(fields["run_id"]), bool(fields.get("ending"))
        return Run(run_id, job and str(job), holder and str(holder), int(beat), ending)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigurationError(f"{store.url}/{keys.RUN} is not this system's: choose an empty prefix in CKPT_STORE") from None


def _checked(store: Store, run: Run, run_id: str | None, job: str | None) -> Run:
    match belongs(run, run_id=run_id, job=job):
        case Verdict.OTHER_RUN:
            raise ConfigurationError(
                f"{store.url} belongs to run {run.run_id[:80]!r}, this pod is of run {run_id!r}: "
                "give each run its own prefix in CKPT_STORE"
            )
        case Verdict.OTHER_JOB:
            raise ConfigurationError(
                f"{store.url} belongs to job {run.job!r}, this pod is of job {job!r}: give each run its own prefix in "
                f"CKPT_STORE, or set CKPT_RUN_ID={run.run_id} to go on with that run"
            )
    return run
