"""The limit of the bandwidth, by a clock that only waiting moves."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sidecar.errors import Stopped
from sidecar.transfer import RateGate


class Clock:
    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("sidecar.transfer.time", clock)
    return clock


def gate_at(clock: Clock, bytes_per_s: int | None) -> RateGate:
    gate = RateGate(bytes_per_s)

    def wait(timeout_s: float | None = None) -> None:
        clock.now_s += timeout_s or 0.0

    gate._condition.wait = wait  # type: ignore[method-assign]
    return gate


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 1 << 18), min_size=50, max_size=400), st.integers(1000, 10**9))
def test_blocks_pass_at_the_limit_within_five_percent(clock: Clock, blocks: list[int], limit: int) -> None:
    gate, began_s = gate_at(clock, limit), clock.now_s
    for size_bytes in blocks:
        gate.pass_through(size_bytes)
    # The last block has passed and not yet been paid for.
    assert clock.now_s - began_s == pytest.approx(sum(blocks[:-1]) / limit, rel=0.05)


def test_time_in_which_nothing_was_sent_is_not_made_up_for(clock: Clock) -> None:
    gate = gate_at(clock, 1000)
    gate.pass_through(1000)
    clock.now_s += 100
    began_s = clock.now_s
    for _ in range(4):
        gate.pass_through(1000)
    assert clock.now_s - began_s == pytest.approx(3.0)


def test_a_closed_gate_stops_who_comes_and_who_waits() -> None:
    gate = RateGate(1)
    gate.pass_through(100)

    threading.Timer(0.1, gate.close).start()
    began_s = time.monotonic()
    with pytest.raises(Stopped):
        gate.pass_through(100)
    assert time.monotonic() - began_s < 5
    with pytest.raises(Stopped):
        gate.pass_through(0)


def test_a_limit_that_is_lifted_lets_waiters_go() -> None:

    gate = RateGate(1)
    gate.pass_through(100)
    threading.Timer(0.1, lambda: gate.limit(None)).start()
    began_s = time.monotonic()
    gate.pass_through(100)
    assert time.monotonic() - began_s < 5
