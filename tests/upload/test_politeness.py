"""Training goes first, until the pod is going."""

from __future__ import annotations

import os
import threading

from tests.upload.parts import transfers


def how_this_thread_runs() -> tuple[int, int]:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), os.sched_getscheduler(0)


async def test_what_is_sent_waits_for_whoever_computes_until_the_pod_is_going() -> None:
    ours = how_this_thread_runs()
    with transfers(concurrency=1) as running:
        assert await running.once(how_this_thread_runs) == (19, os.SCHED_BATCH)
        running.hurry()
        assert await running.once(how_this_thread_runs) == ours
        running.calm()
        assert await running.once(how_this_thread_runs) == (19, os.SCHED_BATCH)
    assert how_this_thread_runs() == ours
