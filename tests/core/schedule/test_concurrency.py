from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.core.schedule.concurrency import (
    ANSWERED_WITHIN_S,
    EACH_SMALL,
    FEWEST_AT_START,
    LONG_S,
    NEAR,
    REST_S,
    SLOWED_REST_S,
    SMALL_S,
    UNANSWERED_BYTES,
    Concurrency,
    SmallRequests,
    awaits_answers,
    is_near,
    small_requests,
)

MIB = 1 << 20
CORES = 4
mosts = st.integers(1, 64)
happenings = st.lists(st.tuples(st.floats(0, 30), st.sampled_from(["sent", "slowed", "idle"]), st.integers(0, 64 * MIB)))


def run(state: Concurrency, rate_of: Callable[[int], float], *, seconds: float, now_s: float = 0.0) -> Concurrency:
    """Send parts of 16 MiB through a link that is ``rate_of(limit)`` bytes per second fast."""
    end_s = now_s + seconds
    while now_s < end_s:
        now_s += 16 * MIB / rate_of(state.limit)
        state = state.sent(16 * MIB, now_s=now_s)
    return state


@given(mosts, happenings)
def test_the_limit_stays_between_one_and_what_is_allowed(most: int, times: list[tuple[float, str, int]]) -> None:
    state, now_s = Concurrency.begin(most=most, cores=CORES, now_s=0.0), 0.0
    for waited_s, what, size_bytes in times:
        now_s += waited_s
        if what == "sent":
            state = state.sent(size_bytes, now_s=now_s)
        else:
            state = state.slowed_down(now_s=now_s) if what == "slowed" else state.idle(now_s=now_s)
        assert 1 <= state.limit <= most


@given(mosts)
def test_a_link_that_more_requests_make_faster_gets_all_that_are_allowed(most: int) -> None:
    state = run(Concurrency.begin(most=most, cores=CORES, now_s=0.0), lambda limit: limit * 100e6, seconds=60)
    assert state.limit == most


@given(mosts)
def test_a_full_link_gets_no_more_requests(most: int) -> None:
    state = run(Concurrency.begin(most=most, cores=CORES, now_s=0.0), lambda _: 1e9, seconds=REST_S - 5)
    assert state.limit == min(CORES, most)


@given(mosts)
def test_two_cores_send_three_at_once_to_a_store_that_is_far_away(most: int) -> None:
    near, far = (Concurrency.begin(most=most, cores=2, now_s=0.0, round_trip_s=s) for s in (0.001, 0.03))
    assert (near.limit, far.limit) == (min(2, most), min(3, most))


@given(mosts, st.floats(0, 10), st.floats(0, 10))
def test_the_farther_away_the_store_the_more_small_requests_run_at_once(most: int, one_s: float, other_s: float) -> None:
    near, far = (small_requests(most=most, round_trip_s=s) for s in sorted((one_s, other_s)))
    assert 1 <= near.threads <= far.threads
    assert max(near.threads * near.at_once, far.threads * far.at_once) <= most
    assert min(most, EACH_SMALL) <= near.threads * near.at_once
    assert small_requests(most=most, round_trip_s=None) == SmallRequests(most, 1)
    assert small_requests(most=most, round_trip_s=10.0) == SmallRequests(most, 1)


@given(st.integers(EACH_SMALL, 256))
def test_one_thread_is_enough_for_a_store_that_answers_at_once(most: int) -> None:
    assert small_requests(most=most, round_trip_s=0.0003) == SmallRequests(1, EACH_SMALL)


def test_small_requests_share_a_thread_where_a_round_trip_has_room_for_few() -> None:
    assert [is_near(s) for s in (None, NEAR * SMALL_S, (NEAR + 1) * SMALL_S)] == [False, True, False]
    assert small_requests(most=64, round_trip_s=NEAR * SMALL_S) == SmallRequests(2, EACH_SMALL)
    assert small_requests(most=64, round_trip_s=(NEAR + 1) * SMALL_S) == SmallRequests(NEAR + 1, 1)
    assert small_requests(most=2, round_trip_s=0.0) == SmallRequests(1, 2)
    assert small_requests(most=7, round_trip_s=NEAR * SMALL_S) == SmallRequests(1, EACH_SMALL)


def test_a_long_round_trip_gets_one_request_more_at_least() -> None:
    limits = [Concurrency.begin(most=64, cores=1, now_s=0.0, round_trip_s=s).limit for s in (None, LONG_S / 2, LONG_S)]
    assert limits == [FEWEST_AT_START, FEWEST_AT_START, FEWEST_AT_START + 1]


WARM = Concurrency(4, 64, 0.0, sent_bytes=700, requests=7, is_cold=False)


def test_a_window_ends_after_its_time_with_two_requests_for_each_of_the_limit() -> None:
    assert WARM.sent(100, now_s=0.9) == replace(WARM, sent_bytes=800, requests=8)
    few = replace(WARM, requests=6)
    assert few.sent(100, now_s=1.0) == replace(few, sent_bytes=800, requests=7)
    assert replace(WARM, is_cold=True).sent(100, now_s=1.0) == Concurrency(4, 64, 1.0, is_cold=False)
    raised = Concurrency(6, 64, 1.0, before=(4, 800.0), is_cold=False)
    assert WARM.sent(100, now_s=1.0) == raised
    assert replace(WARM, rest_until_s=1.0).sent(100, now_s=1.0) == replace(raised, rest_until_s=1.0)
    assert replace(WARM, rest_until_s=1.5).sent(100, now_s=1.0) == Concurrency(4, 64, 1.0, rest_until_s=1.5, is_cold=False)
    assert replace(WARM, most=4).sent(100, now_s=1.0) == Concurrency(4, 4, 1.0, is_cold=False)
    assert replace(WARM, most=5).sent(100, now_s=1.0).limit == 5
    assert replace(WARM, limit=1).sent(100, now_s=1.0).limit == 2
    later = replace(WARM, since_s=10.0)
    assert later.sent(100, now_s=10.5) == replace(later, sent_bytes=800, requests=8)
    assert later.sent(100, now_s=12.0).before == (4, 400.0)


def test_a_higher_limit_stays_if_it_brings_its_share() -> None:
    tried = Concurrency(8, 64, 0.0, sent_bytes=1300, requests=15, before=(4, 1000.0), is_cold=False)
    assert tried.sent(0, now_s=1.0) == Concurrency(12, 64, 1.0, before=(8, 1300.0), is_cold=False)
    in_vain = replace(tried, sent_bytes=1299).sent(0, now_s=1.0)
    assert in_vain == Concurrency(4, 64, 1.0, rest_until_s=1.0 + REST_S, is_cold=False)


def test_answers_of_another_moment_halve_the_limit_again() -> None:
    once = Concurrency(8, 64, 0.0).slowed_down(now_s=5.0)
    assert once == Concurrency(4, 64, 5.0, rest_until_s=5.0 + SLOWED_REST_S, slowed_s=5.0)
    assert once.slowed_down(now_s=5.9) is once
    assert once.slowed_down(now_s=6.0).limit == 2
    assert Concurrency(1, 64, 0.0).slowed_down(now_s=0.0).limit == 1


def test_the_answers_that_are_awaited_at_the_limits() -> None:
    assert [awaits_answers([size], limit=1, bytes_per_s=None) for size in (UNANSWERED_BYTES - 1, UNANSWERED_BYTES)] == [
        False,
        True,
    ]
    assert [awaits_answers([size], limit=1, bytes_per_s=100.0) for size in (199, 200)] == [False, True]
    assert not awaits_answers([UNANSWERED_BYTES], limit=2, bytes_per_s=None)


def test_the_limit_settles_where_the_link_is_full() -> None:
    state = run(Concurrency.begin(most=64, cores=CORES, now_s=0.0), lambda limit: min(limit, 12) * 80e6, seconds=25)
    assert 9 <= state.limit <= 14


@settings(max_examples=25)
@given(mosts)
def test_a_store_that_asks_to_slow_down_gets_half_and_is_left_alone_for_a_while(most: int) -> None:
    fast = run(Concurrency.begin(most=most, cores=CORES, now_s=0.0), lambda limit: limit * 100e6, seconds=60)
    slowed = fast.slowed_down(now_s=60.0).slowed_down(now_s=60.2)  # two answers to one burst
    assert slowed.limit == max(1, fast.limit // 2)
    later = run(slowed, lambda limit: limit * 100e6, seconds=SLOWED_REST_S - 2, now_s=60.2)
    assert later.limit == slowed.limit
    assert run(later, lambda limit: limit * 100e6, seconds=60, now_s=70.0).limit == most


def test_time_in_which_nothing_waited_says_nothing() -> None:
    state = Concurrency.begin(most=64, cores=CORES, now_s=0.0).sent(MIB, now_s=0.5).idle(now_s=100.0)
    assert state.sent_bytes == 0
    assert state.since_s == 100.0


@given(mosts, st.integers(1, 256))
def test_it_begins_with_two_to_four_and_never_more_than_are_allowed(most: int, cores: int) -> None:
    assert Concurrency.begin(most=most, cores=cores, now_s=0.0).limit == min(most, max(2, min(4, cores)))


def test_a_slow_beginning_does_not_make_more_requests_look_faster() -> None:
    state = Concurrency.begin(most=64, cores=2, now_s=0.0)
    for begin in range(4):  # connections take a while to become fast
        state = state.sent(16 * MIB, now_s=1.0 + begin / 10)
    assert run(state, lambda _: 100e6, seconds=REST_S - 5, now_s=1.3).limit == 2


@given(sent=st.lists(st.integers(1, 1 << 30), max_size=40), limit=st.integers(1, 32), rate=st.none() | st.floats(0, 1e10))
def test_the_answers_that_are_awaited_are_worth_two_seconds_of_the_link_and_as_many_as_it_may_carry(
    sent: list[int], limit: int, rate: float | None
) -> None:
    waits = awaits_answers(sent, limit=limit, bytes_per_s=rate)
    assert not (waits and len(sent) < limit), "a slow link keeps its requests"
    assert not (waits and sum(sent) < (UNANSWERED_BYTES if rate is None else ANSWERED_WITHIN_S * rate))
    if not waits and len(sent) >= limit:
        assert not awaits_answers(sent[:-1], limit=limit, bytes_per_s=rate), "one more body makes no room"
