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
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

from structlog.testing import capture_logs

from sidecar.core.manifest import decode_manifest
from sidecar.upload import committing, documents, gathering
from tests.simulation.schedule import Schedule

BATCH = 500


@contextmanager
def quiet() -> Iterator[list[MutableMapping[str, Any]]]:
    """Without what the sidecar logs, and reading equal documents once."""
    decoded = functools.lru_cache(2048)(decode_manifest)
    with ExitStack() as patches:
        for module in (committing, documents, gathering):
            patches.enter_context(patch.object(module, "decode_manifest", decoded))
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
    gc.disable()
    with quiet() as logged:
        for seed in seeds:
            try:
                totals.update({name: int(value) for name, value in asdict(Schedule(seed).run()).items()})
            except Exception as error:
                broken.append((seed, f"{type(error).__name__}: {error}"))
            if seed % 50 == 0:
                logged.clear()
                gc.collect()
    gc.enable()
    gc.unfreeze()
    return totals, broken
