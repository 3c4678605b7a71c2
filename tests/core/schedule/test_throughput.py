from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.schedule.throughput import (
    LONG_S,
    MEASURED_AFTER_S,
    SHORT_S,
    TELLING_BYTES,
    WINDOW_S,
    Rate,
    RateEstimator,
    Throughput,
    estimated,
)

# Whole seconds, so that the brute force can count them one by one.
requests = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20), st.integers(0, 10**9)), max_size=12).map(
    lambda drawn: sorted(((began, began + took, size) for began, took, size in drawn), key=lambda r: r[1])
)


def measured(sent: list[tuple[int, int, int]], *, window_s: float = WINDOW_S) -> float | None:
    throughput = Throughput(window_s=window_s)
    for began_s, ended_s, size_bytes in sent:
        throughput.bytes_per_s()  # asked in between, it must not remember too long
        throughput.add(size_bytes, began_s=began_s, now_s=ended_s)
    return throughput.bytes_per_s()


def counted(sent: list[tuple[int, int, int]], *, window_s: float = WINDOW_S) -> float | None:
    """The rate by looking at each second: was anything under way in it?"""
    lately = [r for r in sent if r[1] >= sent[-1][1] - window_s]
    busy_s = sum(any(began <= second < ended for began, ended, _ in lately) for second in range(100))
    total_bytes = sum(size for _, _, size in lately)
    return total_bytes / busy_s if busy_s and total_bytes else None


@given(requests, st.integers(1, 40))
def test_the_rate_is_the_bytes_of_the_window_by_its_busy_seconds(sent: list[tuple[int, int, int]], window_s: int) -> None:
    want = counted(sent, window_s=window_s)
    assert measured(sent, window_s=window_s) == (None if want is None else pytest.approx(want))


@given(requests, st.integers(0, 10**6))
def test_the_rate_does_not_depend_on_when_the_clock_began(sent: list[tuple[int, int, int]], shift_s: int) -> None:
    later = [(began + shift_s, ended + shift_s, size) for began, ended, size in sent]
    assert measured(later) == measured(sent)


def test_nothing_sent_has_no_rate() -> None:
    assert Throughput().bytes_per_s() is None
    assert measured([(0, 5, 0)]) is None
    assert measured([(5, 5, 100)]) is None


def test_requests_side_by_side_add_up() -> None:
    assert measured([(0, 10, 100), (0, 10, 100), (0, 10, 100)]) == 30.0


def test_idle_time_does_not_count() -> None:
    assert measured([(0, 1, 100), (11, 12, 100)]) == 100.0


def test_what_is_older_than_the_window_is_forgotten() -> None:
    assert measured([(0, 1, 1_000_000), (100, 101, 5)]) == 5.0


def test_the_last_measurement_stays_however_long_ago() -> None:
    throughput = Throughput(window_s=1)
    throughput.add(10, began_s=0, now_s=5)
    assert throughput.bytes_per_s() == 2.0


def test_a_few_small_requests_do_not_say_how_fast_the_link_is() -> None:
    throughput = Throughput()
    throughput.add(2048, began_s=0.0, now_s=0.03)
    assert throughput.bytes_per_s() == pytest.approx(2048 / 0.03)
    assert throughput.telling_bytes_per_s() is None
    throughput.add(8 << 20, began_s=0.03, now_s=0.1)
    assert throughput.telling_bytes_per_s() == throughput.bytes_per_s()


def test_four_mebibytes_or_two_seconds_tell_the_rate() -> None:
    for size_bytes, took_s, tells in (
        (TELLING_BYTES, 0.5, True),
        (TELLING_BYTES - 1, 0.5, False),
        (1, MEASURED_AFTER_S, True),
        (1, MEASURED_AFTER_S - 0.5, False),
    ):
        throughput = Throughput()
        throughput.add(size_bytes, began_s=0.0, now_s=took_s)
        assert (throughput.telling_bytes_per_s() is not None) is tells


def test_what_ended_at_the_beginning_of_the_window_counts() -> None:
    assert measured([(0, 1, 10), (30, 31, 20)], window_s=30.0) == 15.0


def test_samples_are_at_even_distances_and_none_is_nothing() -> None:
    assert Rate(0.0, 1.0, 8.0).samples(5) == [8e-9, 2.0, 4.0, 6.0, 8.0]
    assert Rate(1.0, 1.0, 3.0).samples(2) == [1.0, 3.0]
    assert Rate(1.0, 2.0, 3.0).at_most(2.0) == Rate(1.0, 2.0, 2.0)
    assert Rate(1.0, 2.0, 3.0).at_most(None) == Rate(1.0, 2.0, 3.0)


def sampled(*samples: tuple[float, int, bool]) -> RateEstimator:
    sent = RateEstimator()
    for now_s, passed_bytes, busy in samples:
        sent.sample(passed_bytes, now_s=now_s, busy=busy)
    return sent


def test_only_busy_time_between_two_samples_counts() -> None:
    assert sampled((0.0, 0, True), (1.9, 19, True)).bytes_per_s(LONG_S) is None
    assert sampled((0.0, 0, True), (2.0, 20, True)).bytes_per_s(LONG_S) == 10.0
    assert sampled((0.0, 0, True), (2.0, 20, True), (2.0, 90, True)).bytes_per_s(LONG_S) == 10.0
    assert sampled((0.0, 0, True), (2.0, 20, True), (9.0, 90, False), (10.0, 120, True)).bytes_per_s(LONG_S) == 50 / 3


def test_the_latest_busy_seconds_count() -> None:
    slower = sampled(*((float(second), 100 * second if second < 8 else 700 + 10 * (second - 7), True) for second in range(13)))
    assert slower.bytes_per_s(SHORT_S) == 10.0
    assert slower.bytes_per_s(LONG_S) == (5 * 10 + 5 * 100) / 10
    assert slower.bytes_per_s(1000.0) == (5 * 10 + 6 * 100) / 11, "older samples are forgotten"


def test_the_estimate_has_a_margin_around_what_was_measured() -> None:
    nothing = RateEstimator()
    assert estimated(arrived=100.0, sent=nothing, limit=None) == Rate(pytest.approx(90.0), 100.0, pytest.approx(110.0))
    assert estimated(arrived=100.0, sent=nothing, limit=95.0) == Rate(pytest.approx(90.0), 95.0, 95.0)
    assert estimated(arrived=None, sent=nothing, limit=100.0) == Rate(pytest.approx(70.0), 100.0, 100.0)
    sent = sampled((0.0, 0, True), (2.0, 400, True))
    assert estimated(arrived=100.0, sent=sent, limit=None) == Rate(pytest.approx(90.0), 100.0, pytest.approx(220.0))
    assert estimated(arrived=None, sent=sent, limit=None) == Rate(pytest.approx(180.0), 200.0, pytest.approx(220.0))


def test_a_link_so_slow_that_little_arrives_is_known_after_a_while() -> None:
    throughput = Throughput()
    throughput.add(100_000, began_s=0.0, now_s=5.0)
    assert throughput.telling_bytes_per_s() == 20_000.0
