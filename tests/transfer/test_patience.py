"""An executor whose patience ends: a person waits for the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sidecar.errors import AccessRefused, StoreBusy, StoreError, StoreUnavailable
from sidecar.transfer.executor import StoreExecutor
from sidecar.transfer.health import Health
from sidecar.transfer.rate_gate import RateGate, RetryGate


@contextmanager
def executor(patience_s: float | None) -> Iterator[StoreExecutor]:
    running = StoreExecutor(concurrency=1, gate=RateGate(None), health=Health(), patience_s=patience_s)
    try:
        yield running
    finally:
        running.close()


@pytest.mark.parametrize(("patience_s", "error", "most"), [(0.0, StoreUnavailable("away"), 1), (60.0, AccessRefused("no"), 1)])
async def test_a_request_is_given_up_when_patience_is_over_and_a_refusal_at_once(
    patience_s: float, error: StoreError, most: int
) -> None:
    calls = []

    def fails() -> None:
        calls.append(1)
        raise error

    with executor(patience_s) as running:
        with pytest.raises(type(error)):
            await running.persistently(fails)
        assert running.health.trouble == str(error)
    assert len(calls) == most


async def test_a_request_that_recovers_within_the_patience_is_answered() -> None:
    calls = []

    def recovers() -> int:
        calls.append(1)
        if len(calls) < 2:
            raise StoreUnavailable("away")
        return 7

    with executor(30.0) as running:
        assert await running.persistently(recovers) == 7


async def test_no_wait_is_longer_than_the_patience_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def pause(wait_s: float, _: object, **__: object) -> None:
        waits.append(wait_s)

    def fails() -> None:
        raise StoreUnavailable("away")

    with executor(0.3) as running, monkeypatch.context() as patched:
        patched.setattr(running, "pause", pause)
        with pytest.raises(StoreUnavailable):
            await running.persistently(fails)
    assert waits
    assert max(waits) <= 0.3


@pytest.mark.parametrize(
    ("failures", "error"), [(1, StoreUnavailable), (2, StoreUnavailable), (1, StoreBusy), (1, AccessRefused)]
)
async def test_after_an_outage_a_request_does_not_sleep_on_and_one_that_fails_beside_others_does(
    failures: int, error: type[StoreError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store had answered others again for up to half a minute."""
    monkeypatch.setattr("sidecar.transfer.executor.delay_s", lambda *_, **__: 30.0)
    calls: list[int] = []

    def recovers() -> int:
        calls.append(1)
        if len(calls) <= failures:
            raise error("away")
        return 7

    with executor(None) as running:
        waiting = asyncio.create_task(running.persistently(recovers))
        for tries in range(1, failures + 1):
            while len(calls) < tries:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            await running.once(int)
        done, _ = await asyncio.wait({waiting}, timeout=1.0)
        assert bool(done) == (failures == 1 and error is StoreUnavailable)
        waiting.cancel()


async def test_an_answer_ends_a_pause_that_begins_in_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request slept on for up to half a minute, beside a store that answered."""
    with executor(None) as running:
        pausing = asyncio.create_task(running.pause(30.0, is_outage=True))
        await asyncio.sleep(0)  # what it waits for has not begun to run
        loop = asyncio.get_running_loop()
        (answered := loop.create_future()).set_result(7)
        monkeypatch.setattr(loop, "run_in_executor", lambda *_: answered)
        assert await running.once(int) == 7
        async with asyncio.timeout(5.0):
            await pausing


async def test_an_upload_that_loses_its_priority_when_its_pause_begins_does_not_sleep_on() -> None:
    """It kept its place among the requests, which the upload of higher priority was to have."""
    gate = RetryGate(lambda: None)
    with executor(None) as running:
        pausing = asyncio.create_task(running.pause(30.0, gate))
        await asyncio.sleep(0)
        gate.put(behind=True)
        async with asyncio.timeout(5.0):
            await pausing
