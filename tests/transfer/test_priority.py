"""Training goes first, until the pod terminates, and but for what it waits for."""

from __future__ import annotations

import asyncio
import os
import threading

from sidecar.transfer.executor import awaited
from tests.upload.parts import executor


def how_this_thread_runs() -> tuple[int, int]:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), os.sched_getscheduler(0)


async def test_what_is_sent_waits_for_whoever_computes_until_the_pod_terminates() -> None:
    ours = how_this_thread_runs()
    with executor(concurrency=1) as running:
        assert await running.once(how_this_thread_runs) == (19, os.SCHED_BATCH)
        running.hurry()
        assert await running.once(how_this_thread_runs) == ours
        running.calm()
        assert await running.once(how_this_thread_runs) == (19, os.SCHED_BATCH)
    assert how_this_thread_runs() == ours


async def test_what_the_trainer_waits_for_does_not_wait_for_whoever_computes() -> None:
    ours = how_this_thread_runs()
    with executor(concurrency=1) as running:
        before = asyncio.create_task(running.once(how_this_thread_runs))
        with awaited():
            assert await running.once(how_this_thread_runs) == ours
            assert await asyncio.create_task(running.once(how_this_thread_runs)) == ours
        assert await before == await running.once(how_this_thread_runs) == (19, os.SCHED_BATCH)
