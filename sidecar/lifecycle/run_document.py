"""``run.json`` at the store's root: which run the prefix belongs to, and its present holder."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable

from sidecar.core.format import keys
from sidecar.core.lifecycle.prefix_ownership import Ownership, Run, belongs
from sidecar.core.lifecycle.run_document import decode_run, encode_run
from sidecar.errors import AlreadyExists, ConfigurationError, LaterRun, NotFound, OversizedDocument, UnreadableRun
from sidecar.store.protocol import Store
from trainer_hook.contract import ContractError, LaterFormatError

MAX_RUN_BYTES = 1 << 20
"""Maximum size of ``run.json`` and ``run-asked.json``: enough for thousands of attempts."""
UNREADABLE_TRIES, UNREADABLE_PAUSE_S = 3, 1.0
"""Number of reads, and the seconds between two, before ``run.json`` counts as not this system's."""


def claim(store: Store, *, run_id: str | None, job: str | None = None) -> Run:
    """Return the run that owns the prefix; create it if there is none. Blocks.

    Args:
        store: The opened store.
        run_id: The run that this pod belongs to; ``None``: the run of its job, else any.
        job: Namespace and name of the pod's job; ``None``: unknown.

    Raises:
        ConfigurationError: The prefix belongs to another run or job, or its ``run.json`` cannot be read.
    """
    return _checked(store, _patiently(lambda: _read_or_create(store, run_id, job)), run_id, job)


def owner(store: Store, *, run_id: str | None, job: str | None = None) -> Run | None:
    """Return the run that owns the prefix as ``claim`` does, or ``None`` if there is none: nothing is written. Blocks.

    Raises:
        ConfigurationError: As ``claim``.
    """
    try:
        return _checked(store, _patiently(lambda: read(store)), run_id, job)
    except NotFound:
        return None


def _patiently(read_run: Callable[[], Run]) -> Run:
    try:
        for _ in range(UNREADABLE_TRIES - 1):
            with contextlib.suppress(UnreadableRun):  # perhaps damaged in transit, or about to be removed by its writer
                return read_run()
            time.sleep(UNREADABLE_PAUSE_S)
        return read_run()
    except UnreadableRun as error:
        raise ConfigurationError(str(error)) from None


def _read_or_create(store: Store, run_id: str | None, job: str | None) -> Run:
    try:
        return read(store)
    except NotFound:
        mine = Run(run_id or uuid.uuid4().hex[:12], job)
    try:
        store.put(keys.RUN, encode_run(mine), only_if_absent=True)
    except AlreadyExists:  # another node created it first
        return read(store)
    return mine


def read(store: Store, below: str = "") -> Run:
    """Return the run in the store. Blocks.

    ``below``: prefix of a folder whose run it is, with its ``/``; empty: that of the store itself.

    Raises:
        NotFound: There is no ``run.json``.
        UnreadableRun: It is not this system's.
    """
    try:
        return decode_run(store.get(f"{below}{keys.RUN}", most_bytes=MAX_RUN_BYTES))
    except LaterFormatError as error:
        raise LaterRun(f"{store.url}/{below}{keys.RUN}", error) from None
    except ContractError as error:
        size_bytes = error.size_bytes if isinstance(error, OversizedDocument) else None
        raise UnreadableRun(f"{store.url}/{below}{keys.RUN}", size_bytes=size_bytes) from None


def _checked(store: Store, run: Run, run_id: str | None, job: str | None) -> Run:
    match belongs(run, run_id=run_id, job=job):
        case Ownership.OTHER_RUN:
            raise ConfigurationError(
                f"{store.url} belongs to run {run.run_id[:80]!r}, this pod is of run {run_id!r}: "
                f"give each run its own prefix in CKPT_STORE, or set CKPT_RUN_ID={run.run_id[:80]} to go on with that run"
            )
        case Ownership.OTHER_JOB:
            raise ConfigurationError(
                f"{store.url} belongs to job {run.job!r}, this pod is of job {job!r}: give each run its own prefix in "
                f"CKPT_STORE, or set CKPT_RUN_ID={run.run_id} to go on with that run"
            )
    return run
