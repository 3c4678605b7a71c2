"""Runs many schedules on all cores."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator, MutableMapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from structlog.testing import capture_logs

from sidecar.repository import documents
from sidecar.upload.commit import committer, existing_commit, manifest_collector
from tests.simulation.audit import commit_in, manifest_in
from tests.simulation.schedule import Schedule
from trainer_hook.contract import rfc3339

BATCH = 500


@contextmanager
def quiet() -> Iterator[list[MutableMapping[str, Any]]]:
    """Without what the sidecar logs, and reading equal documents once."""
    stamped = functools.lru_cache(512)(rfc3339)
    with ExitStack() as patches:
        for module in (committer, documents, manifest_collector):
            patches.enter_context(patch.object(module, "decode_manifest", manifest_in))
        patches.enter_context(patch.object(documents, "decode_commit", commit_in))
        for module in (committer, existing_commit):
            patches.enter_context(patch.object(module, "rfc3339", stamped))
        yield patches.enter_context(capture_logs())


def search(seeds: range, *, workers: int | None = None) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Run a schedule per seed. Returns totals of what happened, and each seed that broke an invariant with the reason."""
    batches = [seeds[at : at + BATCH] for at in range(0, len(seeds), BATCH)]
    totals: Counter[str] = Counter()
    broken: list[tuple[int, str]] = []
    workers = workers or len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        for counted, found in pool.map(batch, batches):
            totals.update(counted)
            broken += found
    return totals, broken


def batch(seeds: Sequence[int]) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Run some schedules in this process."""
    totals: Counter[str] = Counter()
    broken = []
    gc.collect()
    gc.freeze()
    gc.disable()  # a schedule leaves it nothing to do
    with quiet() as logged:
        for seed in seeds:
            try:
                totals.update({name: int(value) for name, value in vars(Schedule(seed).run()).items()})
            except Exception as error:
                broken.append((seed, f"{type(error).__name__}: {error}"))
            logged.clear()
    gc.enable()
    gc.unfreeze()
    return totals, broken
