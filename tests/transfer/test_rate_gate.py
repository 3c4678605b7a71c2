"""The limit of the bandwidth, by a clock that only waiting moves."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sidecar.errors import Stopped
from sidecar.transfer.rate_gate import PauseGate, RateGate
from tests.process.sidecar_process import until


class Clock:
    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("sidecar.transfer.rate_gate.time", clock)
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


@pytest.mark.parametrize("limit", [None, 10**12])
def test_what_passes_is_counted_with_and_without_a_limit(limit: int | None) -> None:
    gate = RateGate(limit)
    gates = [PauseGate(gate) for _ in range(3)]

    def send(pause_gate: PauseGate) -> None:
        for _ in range(10_000):
            pause_gate.pass_through(7)

    threads = [threading.Thread(target=send, args=(pause_gate,)) for pause_gate in gates]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gate.passed_bytes == 3 * 10_000 * 7
    assert [pause_gate.passed_bytes for pause_gate in gates] == [10_000 * 7] * 3


def test_what_is_held_waits_and_as_many_as_are_let_through_go_on() -> None:
    pause_gate, passed, end = PauseGate(RateGate(None)), [], threading.Event()

    def send(number: int) -> None:
        for _ in range(3):
            pause_gate.pass_through(10)
        passed.append(number)
        end.wait(10)  # as the threads of the pool, which outlive a request

    pause_gate.set_paused(True, exempt=2)
    threads = [threading.Thread(target=send, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    until(lambda: len(passed) == 2)
    time.sleep(0.1)
    assert len(passed) == 2
    assert pause_gate.passed_bytes == 60
    pause_gate.set_paused(False)
    until(lambda: len(passed) == 5)
    end.set()
    for thread in threads:
        thread.join(5)
    assert sorted(passed) == list(range(5))
    assert pause_gate.passed_bytes == 150


def test_a_closed_gate_ends_those_that_are_held() -> None:
    gate = RateGate(None)
    pause_gate, ended = PauseGate(gate), threading.Event()
    pause_gate.set_paused(True)

    def send() -> None:
        with pytest.raises(Stopped):
            pause_gate.pass_through(10)
        ended.set()

    threading.Thread(target=send).start()
    gate.close()
    assert ended.wait(5)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_higher_limit_is_for_those_that_wait_too(threads: int) -> None:
    gate, passed = RateGate(100), list[float]()
    gate.pass_through(10_000)  # the next has to wait for 100 s

    def send() -> None:
        gate.pass_through(10_000)
        passed.append(time.monotonic())

    for _ in range(threads):
        threading.Thread(target=send, daemon=True).start()
    time.sleep(0.2)
    began_s = time.monotonic()
    gate.limit(50_000)
    until(lambda: len(passed) == threads, timeout_s=5)
    assert max(passed) - began_s >= 0.2 * (threads - 1)
