"""When a request is sent a second time beside itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.schedule.slow_parts import BEGIN_S, IDLE, SEEN_S, RequestProgress, is_worth_hedging, seen_over_s

PART_BYTES = 16 << 20
LINK = 125e6
sizes = st.integers(0, 1 << 30)
rates = st.floats(1.0, 1e10)


@given(left=sizes, size=sizes, others=sizes, link=rates, times=st.floats(1.5, 1e3))
def test_what_is_as_fast_as_a_second_try_is_left_alone(left: int, size: int, others: int, link: float, times: float) -> None:
    size = max(left, size)
    again_s = BEGIN_S + (size + others) / link
    alone = {"left_bytes": left, "size_bytes": size, "others_left_bytes": others, "link_bytes_per_s": link}
    alone["used_bytes_per_s"] = 0.0
    assert not is_worth_hedging(bytes_per_s=left / again_s, **alone)
    slow = left / (again_s * times * 1.01)
    assert is_worth_hedging(bytes_per_s=slow, **alone) is (left > 0)


@given(left=sizes, size=sizes, others=sizes, link=rates)
def test_what_only_waits_for_its_answer_or_was_not_seen_long_enough_is_left_alone(
    left: int, size: int, others: int, link: float
) -> None:
    its = {"size_bytes": size, "others_left_bytes": others, "used_bytes_per_s": 0.0, "link_bytes_per_s": link}
    assert not is_worth_hedging(left_bytes=0, bytes_per_s=0.0, **its)
    assert not is_worth_hedging(left_bytes=left, bytes_per_s=None, **its)


def test_a_connection_that_stands_still_is_not_waited_for() -> None:
    its = {"left_bytes": 1, "size_bytes": PART_BYTES, "others_left_bytes": 0, "link_bytes_per_s": LINK}
    assert is_worth_hedging(bytes_per_s=0.0, used_bytes_per_s=0.0, **its)


@given(left=sizes, others=sizes, link=rates, used=st.floats(1.01, 3))
def test_where_the_link_is_used_by_others_nothing_is_sent_twice(left: int, others: int, link: float, used: float) -> None:
    its = {"left_bytes": left, "size_bytes": left, "others_left_bytes": others, "link_bytes_per_s": link}
    assert not is_worth_hedging(bytes_per_s=0.0, used_bytes_per_s=IDLE * link * used, **its)


@pytest.mark.parametrize(("mbit_per_s", "again"), [(1000, False), (300, False), (50, True), (5, True)])
def test_half_a_part_over_a_link_of_1_gbit(mbit_per_s: float, again: bool) -> None:
    its = {"left_bytes": PART_BYTES // 2, "size_bytes": PART_BYTES, "others_left_bytes": 0, "link_bytes_per_s": LINK}
    rate = mbit_per_s * 1e6 / 8
    assert is_worth_hedging(bytes_per_s=rate, used_bytes_per_s=rate, **its) is again


@given(steps=st.lists(st.tuples(st.floats(0.01, 0.5), st.integers(0, 1 << 24)), min_size=1, max_size=50))
def test_the_rate_is_that_of_what_was_seen_lately(steps: list[tuple[float, int]]) -> None:
    progress, now_s, left_bytes = RequestProgress(), 0.0, 1 << 40
    progress.record(left_bytes, now_s=now_s, over_s=SEEN_S)
    rates: list[float] = []
    for took_s, sent_bytes in steps:
        now_s, left_bytes = now_s + took_s, left_bytes - sent_bytes
        rates.append(sent_bytes / took_s)
        progress.record(left_bytes, now_s=now_s, over_s=SEEN_S)
    rate = progress.bytes_per_s
    assert (rate is None) == (now_s < SEEN_S)
    if rate is not None:
        assert min(rates) * 0.99 <= rate <= max(rates) * 1.01


def test_a_rate_is_measured_over_the_time_that_was_asked_for() -> None:
    progress = RequestProgress()
    rates: list[float | None] = []
    for left_bytes, now_s in ((100, 0.0), (70, 0.5), (60, 1.0), (50, 1.5), (80, 3.0)):
        progress.record(left_bytes, now_s=now_s, over_s=1.0)
        rates.append(progress.bytes_per_s)
    assert rates == [None, None, 40.0, 20.0, 0.0]
    progress = RequestProgress()
    for left_bytes, now_s in ((100, 0.0), (60, 1.0), (50, 2.0)):
        progress.record(left_bytes, now_s=now_s, over_s=1.0)
    assert progress.bytes_per_s == 10.0


def test_a_second_try_has_to_be_faster_by_half_on_a_link_of_which_half_is_free() -> None:
    its = {"size_bytes": 60, "others_left_bytes": 20, "link_bytes_per_s": 100.0}  # again in 1 s
    assert [is_worth_hedging(left_bytes=left, bytes_per_s=10.0, used_bytes_per_s=50.0, **its) for left in (15, 16)] == [
        False,
        True,
    ]
    assert not is_worth_hedging(left_bytes=16, bytes_per_s=10.0, used_bytes_per_s=51.0, **its)


@given(requests=st.integers(1, 64), link=rates)
def test_over_a_slow_link_a_request_is_seen_for_longer_than_it_needs_for_a_block(requests: int, link: float) -> None:
    over_s = seen_over_s(requests=requests, block_bytes=512 << 10, link_bytes_per_s=link)
    assert over_s >= max(SEEN_S, 2 * (512 << 10) / (link / requests))
