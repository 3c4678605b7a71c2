"""Tasks that run as long as the sidecar."""

from __future__ import annotations

import asyncio
import time

import pytest

from sidecar import tasks


async def test_a_service_that_fails_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "RESTART_AFTER_S", 0.0)
    lives = 0

    async def service() -> None:
        nonlocal lives
        lives += 1
        if lives == 3:
            raise KeyboardInterrupt  # the test's way out
        raise OSError(116, "Stale file handle")

    with pytest.raises(KeyboardInterrupt):
        await tasks.run_forever("service", service)


async def test_the_error_of_a_task_reaches_the_caller_itself_with_its_cause() -> None:
    async def fail(text: str) -> None:
        try:
            int(text)
        except ValueError as error:
            raise OSError(text) from error

    async def run_together() -> None:
        await tasks.run_together([fail("first"), asyncio.Event().wait(), fail("second")])  # type: ignore[list-item]

    with pytest.raises(OSError, match="first") as raised:
        await tasks.run_together([run_together()])
    assert isinstance(raised.value.__cause__, ValueError)
    assert len(asyncio.all_tasks()) == 1


async def test_a_cancelled_caller_of_tasks_is_cancelled() -> None:
    waiting = asyncio.create_task(tasks.run_together([asyncio.Event().wait()]))  # type: ignore[list-item]
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(asyncio.all_tasks()) == 1


async def answered_after(seconds: float) -> str:
    await asyncio.to_thread(time.sleep, seconds)
    return "answer"


async def test_an_answer_that_came_while_the_process_was_stopped_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "TICK_S", 0.05)
    waiting = asyncio.create_task(tasks.in_running_time(0.3, answered_after(0.1)))
    await asyncio.sleep(0.01)
    time.sleep(0.6)
    assert await waiting == "answer"


async def test_a_wait_ends_with_its_time_and_what_was_waited_for_is_cancelled() -> None:
    forever = asyncio.Event()
    with pytest.raises(TimeoutError):
        await tasks.in_running_time(0.05, forever.wait())
    assert len(asyncio.all_tasks()) == 1
    assert await tasks.in_running_time(None, answered_after(0.01)) == "answer"
