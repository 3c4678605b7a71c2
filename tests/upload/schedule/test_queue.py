"""Which uploads wait for others, and what hundreds that wait cost."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from sidecar.catalog.catalog import Catalog, Tracked
from sidecar.catalog.events import Events
from sidecar.core.format.found_checkpoint import Finished
from sidecar.upload.schedule import queue as queue_module
from sidecar.upload.schedule.queue import Active, Queue
from trainer_hook.contract import Node


def queue_of(*steps: int, sent: bool = True) -> tuple[Queue, list[Active]]:
    catalog = Catalog(Events())
    queue = Queue(catalog, cast(Any, None), cast(Any, None))
    actives = []
    for step in steps:
        checkpoint = Finished(f"checkpoint-{step}", "v", step, "periodic", "a", Node(), 1.8e9 + step, 1, (), {})
        tracked: Tracked = catalog.finished(checkpoint, held=True)
        actives.append(queue.active.setdefault(tracked.name, Active(tracked, is_sent=sent)))
    return queue, actives


async def test_the_newest_of_those_that_end_commits_first() -> None:
    queue, (old, middle, new) = queue_of(10, 20, 30)
    assert [queue.has_ending_ahead(active.tracked) for active in (old, middle, new)] == [True, True, False]
    queue.end(new)
    assert [queue.has_ending_ahead(active.tracked) for active in (old, middle)] == [True, False]
    middle.is_deferred = True  # the store refuses it
    assert [queue.has_ending_ahead(active.tracked) for active in (old, middle)] == [False, True]


async def test_what_begins_to_end_is_seen_at_once() -> None:
    queue, (old, new) = queue_of(10, 20, sent=False)
    assert not queue.has_ending_ahead(old.tracked)
    new.is_sent = True
    assert queue.has_ending_ahead(old.tracked)


async def test_what_another_one_waits_for_is_committed_though_newer_ones_keep_coming() -> None:
    queue, (old, new, newer) = queue_of(10, 20, 30)
    newer.is_sent = False
    assert [queue.has_ending_ahead(active.tracked) for active in (old, new)] == [True, False]
    newer.is_sent = True  # before the commit of "new"
    assert [queue.has_ending_ahead(active.tracked) for active in (old, new)] == [True, False], "each would wait for the next"
    queue.end(new)
    assert [queue.has_ending_ahead(active.tracked) for active in (old, newer)] == [True, False]


async def test_hundreds_that_wait_do_not_each_compare_themselves_with_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, actives = queue_of(*range(10, 3010, 10))
    compared, real = [], queue_module.rank
    monkeypatch.setattr(queue_module, "rank", lambda waiting: compared.append(waiting) or real(waiting))

    async def wait(active: Active) -> None:
        wake = None
        while queue.has_ending_ahead(active.tracked, wake):
            wake = await queue.upload_ended()

    waiting = [asyncio.create_task(wait(active)) for active in actives[:-1]]
    await asyncio.sleep(0.05)
    compared.clear()
    queue.end(actives[-1])
    await asyncio.sleep(0.05)
    assert waiting[-1].done()
    assert not waiting[0].done()
    assert len(compared) <= 3 * len(actives)
    for task in waiting:
        task.cancel()


async def test_an_upload_that_ends_as_soon_as_it_is_woken_is_not_waited_for() -> None:
    queue, (old, middle, new) = queue_of(10, 20, 30)

    async def wait(active: Active) -> None:
        wake = None
        while queue.has_ending_ahead(active.tracked, wake):
            wake = await queue.upload_ended()
        queue.end(active)  # as where it was given up meanwhile

    waiting = [asyncio.create_task(wait(active)) for active in (middle, old)]
    await asyncio.sleep(0)
    queue.end(new)
    async with asyncio.timeout(5):
        await asyncio.gather(*waiting)
