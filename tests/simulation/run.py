"""Runs schedules of all kinds, one or many on all cores, and says which of them break an invariant."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol
from unittest.mock import patch

import pytest
import structlog

from sidecar.repository import documents
from sidecar.upload.commit import committer, existing_commit, manifest_collector
from tests.simulation.audit import commit_in, manifest_in
from tests.simulation.job.schedule import JobSchedule
from tests.simulation.retention import RetentionSchedule
from tests.simulation.schedule import Schedule
from trainer_hook.contract import rfc3339

BATCH = {"step": 500, "job": 10, "retention": 50}
"""Schedules that a worker takes at once."""
COLLECT_EVERY = 20
"""Schedules of whole jobs after which cycles are looked for; the others leave none."""
MUST_NOT_FAIL = frozenset({"service_failed", "upload_defect", "resume_failed"})
"""Log events that, with a traceback, say that production code met an unexpected error. An answer to a resume can also be
``resume_failed``: the pod judges it."""


class AnySchedule(Protocol):
    """One seed, one schedule."""

    world: Any

    def run(self) -> Any:
        """Let it happen, once; return counts of what happened."""
        ...


KINDS: dict[str, Callable[..., AnySchedule]] = {"step": Schedule, "job": JobSchedule, "retention": RetentionSchedule}
Logged = Callable[[MutableMapping[str, Any]], None]


@contextmanager
def quiet(listen: Logged | None = None) -> Iterator[None]:
    """Run without what the sidecar logs, and reading equal documents once. ``listen`` gets each log event instead."""

    def heard(_: Any, level: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if listen is not None:
            event["level"] = level
            if event.pop("exc_info", None):
                event["traceback"] = traceback.format_exc()
            listen(event)
        raise structlog.DropEvent

    stamped = functools.lru_cache(512)(rfc3339)
    with ExitStack() as patches:
        for module in (committer, documents, manifest_collector):
            patches.enter_context(patch.object(module, "decode_manifest", manifest_in))
        patches.enter_context(patch.object(documents, "decode_commit", commit_in))
        for module in (committer, existing_commit):
            patches.enter_context(patch.object(module, "rfc3339", stamped))
        before = structlog.get_config()
        structlog.configure(processors=[heard])
        try:
            yield
        finally:
            structlog.configure(**before)


def play(kind: str, seed: int, *, tell: bool = False, logs: bool = False) -> tuple[Counter[str], str | None, list[str]]:
    """Run one schedule. Returns counts of what happened, the invariant that it breaks, and its story.

    Args:
        kind: Of ``KINDS``.
        seed: Decides everything.
        tell: Whether there is a story.
        logs: Whether the story has what the sidecars log.
    """
    schedule = KINDS[kind](seed, tell=tell)
    world = schedule.world
    failed: list[str] = []

    def listen(event: MutableMapping[str, Any]) -> None:
        if event["event"] in MUST_NOT_FAIL and "traceback" in event:
            failed.append(f"{event['event']}: {event['traceback']}")
            if kind == "job":
                world.violate(failed[-1])
        if logs:
            world.tell(f"    log {dict(event)}")

    counts: Counter[str] = Counter()
    broken: str | None = None
    with quiet(listen):
        try:
            outcome = schedule.run()
            counts.update(
                {name: int(value) for name, value in (outcome if isinstance(outcome, dict) else vars(outcome)).items()}
            )
        except Exception as error:
            broken = f"{type(error).__name__}: {error}"
    if broken is None and failed:
        broken = failed[0]
    return counts, broken, world.story or []


def batch(kind: str, seeds: Sequence[int]) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Run some schedules in this process. Returns totals, and each seed that broke an invariant with the reason."""
    totals: Counter[str] = Counter()
    broken = []
    gc.collect()
    gc.freeze()
    gc.disable()
    for number, seed in enumerate(seeds, 1):
        counts, reason, _ = play(kind, seed)
        totals.update(counts)
        if reason is not None:
            broken.append((seed, reason))
        if kind == "job" and number % COLLECT_EVERY == 0:
            gc.collect()
    gc.enable()
    gc.unfreeze()
    return totals, broken


def search(
    kind: str, seeds: Sequence[int], *, mutant: Callable[[pytest.MonkeyPatch], None] | None = None, most_broken: int = 20
) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Run a schedule per seed on all cores, until the limit of broken ones is reached; returns what ``batch`` does."""
    size = BATCH[kind]
    batches = [seeds[at : at + size] for at in range(0, len(seeds), size)]
    totals: Counter[str] = Counter()
    broken: list[tuple[int, str]] = []
    workers = len(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as patches:
        if mutant is not None:
            mutant(patches)
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
            for counted, found in pool.map(functools.partial(batch, kind), batches):
                totals.update(counted)
                broken += found
                if len(broken) >= most_broken:
                    pool.shutdown(wait=False, cancel_futures=True)
                    break
    return totals, broken
