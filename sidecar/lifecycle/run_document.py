"""``run.json`` at the store's root: which run the prefix belongs to, and its present holder."""

from __future__ import annotations

import contextlib
import json
import uuid
from dataclasses import asdict
from typing import Any

from sidecar.core.format import keys
from sidecar.core.lifecycle.fencing import MOST_EPOCH
from sidecar.core.lifecycle.prefix_ownership import Ownership, Run, belongs
from sidecar.errors import AlreadyExists, ConfigurationError, NotFound, OversizedDocument, UnreadableRun
from sidecar.store.protocol import Store
from trainer_hook.contract import FORMAT, encode_json

MAX_RUN_BYTES = 1 << 20
"""Maximum size of ``run.json`` and ``run-asked.json``: enough for thousands of attempts."""


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
        with contextlib.suppress(UnreadableRun):  # perhaps damaged in transit
            return _checked(store, _read_or_create(store, run_id, job), run_id, job)
        return _checked(store, _read_or_create(store, run_id, job), run_id, job)
    except UnreadableRun as error:
        raise ConfigurationError(str(error)) from None


def _read_or_create(store: Store, run_id: str | None, job: str | None) -> Run:
    try:
        return read(store)
    except NotFound:
        mine = Run(run_id or uuid.uuid4().hex[:12], job)
    try:
        store.put(keys.RUN, encode(mine), only_if_absent=True)
    except AlreadyExists:  # another node created it first
        return read(store)
    return mine


def encode(run: Run) -> bytes:
    """Return the document; fields without a value are left out."""
    return encode_json({"format": FORMAT} | {name: value for name, value in asdict(run).items() if value})


def read(store: Store, below: str = "") -> Run:
    """Return the run in the store. Blocks.

    Args:
        store: The opened store.
        below: Prefix of a folder whose run it is, with its ``/``; empty: that of the store itself.

    Raises:
        NotFound: There is no ``run.json``.
        UnreadableRun: It is not this system's.
    """
    try:
        return _parsed(json.loads(store.get(f"{below}{keys.RUN}", most_bytes=MAX_RUN_BYTES)))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        size_bytes = error.size_bytes if isinstance(error, OversizedDocument) else None
        raise UnreadableRun(f"{store.url}/{below}{keys.RUN}", size_bytes=size_bytes) from None


def _parsed(fields: dict[str, Any]) -> Run:
    job, holder = fields.get("job"), fields.get("holder")
    ends_in_s, beat_s = fields.get("ends_in_s"), fields.get("beat_s")
    epoch = int(fields.get("epoch", 0))
    return Run(
        run_id=str(fields["run_id"]),
        job=job and str(job),
        holder=holder and str(holder),
        beat=int(fields.get("beat", 0)),
        ending=bool(fields.get("ending")),
        attempts=tuple(str(attempt) for attempt in fields.get("attempts", ())),
        epoch=epoch if 0 <= epoch <= MOST_EPOCH else 0,  # its holder writes it again
        ends_in_s=None if ends_in_s is None else float(ends_in_s),
        beat_s=None if beat_s is None else float(beat_s),
    )


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
