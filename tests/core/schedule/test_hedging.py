"""When another connection is tried: bounds for any latencies, and patience with a store that is slow as a whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.schedule import hedging
from sidecar.core.schedule.hedging import Flow, Latencies, Quiet

SECONDS = st.floats(0.0, 100.0)
LATENCIES = st.lists(SECONDS, max_size=40)


@given(took=LATENCIES, hurried=st.booleans())
def test_a_request_is_late_soon_after_the_usual_time_and_never_at_once(took: list[float], hurried: bool) -> None:
    late_s = hedging.late_s(took, hurried=hurried)
    usual_s = sorted(took)[len(took) // 2] if took else 0.0
    beyond_s = max(hedging.BEYOND_S, hedging.BEYOND * usual_s)
    assert hedging.LEAST_S * hedging.HURRIED <= late_s <= usual_s + beyond_s < max(usual_s + 2, 2 * usual_s)
    assert late_s > usual_s or late_s >= hedging.LEAST_S * hedging.HURRIED


@given(took=LATENCIES)
def test_a_request_is_late_no_later_when_the_pod_terminates(took: list[float]) -> None:
    assert hedging.late_s(took, hurried=True) <= hedging.late_s(took)


@given(took=LATENCIES, hurried=st.booleans())
def test_a_deletion_is_late_later_than_others(took: list[float], hurried: bool) -> None:
    """The copy of a deletion arrived after the step had been committed again, and deleted a manifest that the commit named."""
    latencies = Latencies()
    for seconds in took:
        for kind in ("PutObject", *hedging.LEAST_OF_KIND_S):
            latencies.took(kind, seconds)
    of_others = latencies.late_s("PutObject", hurried=hurried)
    for kind, least_s in hedging.LEAST_OF_KIND_S.items():
        assert latencies.late_s(kind, hurried=hurried) == max(of_others, least_s)


def test_kinds_have_latencies_of_their_own_and_old_ones_are_forgotten() -> None:
    latencies = Latencies()
    for _ in range(hedging.KEPT):
        latencies.took("slow", 30.0)
    assert latencies.late_s("slow") > 30
    assert latencies.late_s("other") == hedging.UNKNOWN_S
    for _ in range(hedging.KEPT):
        latencies.took("slow", 0.01)
    assert latencies.late_s("slow") == hedging.LEAST_S


@given(late_s=st.floats(0.1, 10), tries=st.integers(1, 50), quiet_s=SECONDS, most_s=st.floats(1, 60))
def test_each_further_try_waits_at_least_as_long_and_none_for_ever(
    late_s: float, tries: int, quiet_s: float, most_s: float
) -> None:
    this, following = (
        hedging.next_try_s(late_s, tries=count, quiet_before_s=quiet_s, most_s=most_s) for count in (tries, tries + 1)
    )
    assert min(late_s, most_s) <= this <= following <= most_s
    assert hedging.next_try_s(late_s, tries=1, quiet_before_s=0, most_s=60) == late_s


@given(late_s=st.floats(0.1, 10), tries=st.integers(1, 50), quiet_s=SECONDS)
def test_a_body_that_was_sent_as_a_whole_is_sent_again_ever_later(late_s: float, tries: int, quiet_s: float) -> None:
    """A proxy may have all of its copies, and forward them over a slow link."""
    most_s = hedging.BODY_MOST_S
    this, following, of_others = (
        hedging.next_try_s(late_s, tries=count, quiet_before_s=quiet_s, most_s=most_s, is_costly=is_body)
        for count, is_body in ((tries, True), (tries + 1, True), (tries, False))
    )
    assert this >= min(of_others, most_s)
    assert this <= following <= most_s
    if tries < 5 and quiet_s < late_s:
        assert following >= min(4 * this, most_s)


@given(waited_s=st.floats(0, 2000), heard_s_ago=st.floats(0, 2000), most_s=st.floats(1, 60))
def test_a_body_has_longer_to_be_answered_while_the_store_is_heard(waited_s: float, heard_s_ago: float, most_s: float) -> None:
    of_body, of_other = (
        hedging.is_given_up(waited_s, most_s=most_s, is_body=is_body, heard_s_ago=heard_s_ago) for is_body in (True, False)
    )
    assert of_other is (waited_s >= most_s)
    assert of_body is (waited_s >= hedging.BODY_MOST_S or (of_other and heard_s_ago >= most_s))


@given(size=st.integers(1, 1 << 40))
def test_bodies_of_one_class_differ_by_less_than_a_factor_of_two(size: int) -> None:
    assert hedging.size_class(2 * size) == hedging.size_class(size) + 1
    assert hedging.size_class(size) <= hedging.size_class(size + 1)


@given(requests=st.integers(0, 200), is_quiet=st.booleans())
def test_of_bodies_that_were_sent_as_a_whole_few_are_hedged_at_a_time(requests: int, is_quiet: bool) -> None:
    at_once = next(
        n for n in range(1000) if not hedging.may_hedge(hedges=n, requests=requests, is_quiet=is_quiet, is_whole_body=True)
    )
    assert 1 <= at_once <= max(1, requests / 6)


def test_tries_of_one_request_at_a_silent_store_grow_apart() -> None:
    at_s, quiet = [0.0], Quiet(most_s=60)
    while at_s[-1] < 60:
        wait_s = hedging.next_try_s(1.5, tries=len(at_s), quiet_before_s=quiet.before_s(at_s[-1]), most_s=60)
        quiet.fell_silent(since_s=at_s[-1], now_s=at_s[-1] + wait_s)
        at_s.append(at_s[-1] + wait_s)
    assert at_s[1:3] == [1.5, 3.0]
    assert len(at_s) <= 8


@given(
    tries=st.integers(0, 20),
    quiet_s=SECONDS,
    rate=st.none() | st.floats(0, 1e10),
    connections=st.integers(0, 100),
    hurried=st.booleans(),
)
def test_a_connection_is_silent_in_bounds(
    tries: int, quiet_s: float, rate: float | None, connections: int, hurried: bool
) -> None:
    silent_s = hedging.silent_s(
        tries=tries, quiet_before_s=quiet_s, most_s=60, bytes_per_s=rate, connections=connections, hurried=hurried
    )
    assert hedging.SILENT_S * hedging.HURRIED <= silent_s <= 60


def test_a_connection_of_a_fast_link_is_silent_soon_and_one_of_many_on_a_slow_link_is_not() -> None:
    fast, slow = (
        hedging.silent_s(tries=0, quiet_before_s=0, most_s=60, bytes_per_s=rate, connections=4) for rate in (10e6, 100e3)
    )
    assert fast == hedging.SILENT_S < 2
    assert slow == hedging.STEP_MOST_S


@given(rate=st.none() | st.floats(0, 1e10), connections=st.integers(0, 100))
def test_no_rate_makes_a_first_silence_longer_than_a_few_seconds(rate: float | None, connections: int) -> None:
    """Little traffic looks like a slow link, and is none."""
    silent_s = hedging.silent_s(tries=0, quiet_before_s=0, most_s=60, bytes_per_s=rate, connections=connections)
    assert silent_s <= hedging.STEP_MOST_S
    little_s = hedging.silent_s(tries=0, quiet_before_s=0, most_s=60, bytes_per_s=100.0, connections=connections)
    assert little_s == hedging.SILENT_S


def test_where_nobody_hears_from_the_store_a_few_requests_ask_for_all() -> None:
    assert [hedging.may_hedge(hedges=n, requests=16, is_quiet=True) for n in (0, 3, 4, 10)] == [True, True, False, False]
    assert hedging.may_hedge(hedges=1, requests=2, is_quiet=True)
    assert hedging.may_hedge(hedges=10, requests=2, is_quiet=False)


def test_quiet_counts_from_the_first_wait_in_vain_and_ends_with_any_sign_of_life() -> None:
    quiet = Quiet(most_s=60)
    assert quiet.before_s(1000.0) == 0
    quiet.fell_silent(since_s=1000.0, now_s=1002.0)
    quiet.fell_silent(since_s=1001.0, now_s=1003.0)
    assert quiet.before_s(1004.0) == 4
    assert quiet.before_s(1100.0) == 0, "an hour in which nothing was asked is not quiet"
    quiet.heard_s = 1005.0
    assert quiet.before_s(1006.0) == 0


def test_the_rate_of_the_last_seconds_is_that_of_all_connections() -> None:
    flow = Flow()
    assert flow.bytes_per_s(0, now_s=0.0) is None
    for tick in range(40):
        flow.record(tick * 25_000, now_s=tick * 0.25)
    rate = flow.bytes_per_s(39 * 25_000, now_s=39 * 0.25)
    assert rate is not None
    assert 90e3 < rate < 110e3
    for tick in range(40, 60):
        flow.record(39 * 25_000, now_s=tick * 0.25)
    assert flow.bytes_per_s(39 * 25_000, now_s=59 * 0.25) == 0


@given(failures=st.integers(0, 1000))
def test_a_far_store_gets_more_time_for_each_connection_that_could_not_be_made(failures: int) -> None:
    within_s = hedging.connect_within_s(failures, first_s=5, most_s=60)
    assert 5 <= within_s <= hedging.connect_within_s(failures + 1, first_s=5, most_s=60) <= 60


def test_a_copy_is_given_up_when_sending_it_would_be_as_fast() -> None:
    assert hedging.copy_within_s(0) < 2
    assert 50 < hedging.copy_within_s(5 << 30) < 60


@given(st.integers(400, 599))
def test_only_errors_of_the_moment_may_be_undone_by_another_try(status: int) -> None:
    assert hedging.may_be_undone(status) is (status >= 500 or status in (409, 412))


@given(st.integers(0, 100), st.integers(0, 10**13))
def test_deadlines_of_connections_and_copies_grow_and_the_first_is_bounded(failures: int, size_bytes: int) -> None:
    this, following = (hedging.connect_within_s(n, first_s=2.0, most_s=20.0) for n in (failures, failures + 1))
    assert 2.0 <= this <= following <= 20.0
    assert hedging.copy_within_s(0) <= hedging.copy_within_s(size_bytes) < hedging.copy_within_s(size_bytes + 2**30)


def test_the_flow_is_sampled_at_most_once_an_interval() -> None:
    flow = Flow()
    flow.record(0, now_s=0.0)
    flow.record(10**9, now_s=hedging.FLOW_EVERY_S / 2)
    assert flow.bytes_per_s(1000, now_s=hedging.FLOW_LEAST_S) == 1000 / hedging.FLOW_LEAST_S


@given(st.integers(0, 10**9), st.floats(0.1, 1e3))
def test_a_connection_moves_if_it_reaches_the_floor(moved_bytes: int, in_s: float) -> None:
    floor = hedging.LEAST_MOVED_BYTES / hedging.SILENT_S
    assert hedging.is_moving(moved_bytes, in_s=in_s) is (moved_bytes > 0 and moved_bytes / in_s >= floor * (1 - 1e-12))


@given(families=st.lists(st.sampled_from([2, 10]), max_size=16), skipped=st.integers(0, 100))
def test_attempts_begin_with_all_addresses_in_turn_and_soon_with_one_of_each_family(families: list[int], skipped: int) -> None:
    order = hedging.address_order(families, skipped=skipped)
    assert sorted(order) == list(range(len(families)))
    firsts = [hedging.address_order(families, skipped=count)[0] for count in range(len(families))]
    assert sorted(firsts) == list(range(len(families)))
    assert {families[first] for first in firsts[:2]} == set(families)


@given(st.lists(st.booleans(), min_size=1, max_size=4), st.integers(2, 3))
def test_the_first_try_is_kept_and_no_more_than_the_most_are_in_flight(are_hedges: list[bool], most: int) -> None:
    choices = hedging.replaceable(are_hedges, most=most)
    assert 0 not in choices
    assert (None in choices) == (len(are_hedges) < most)
    own = [index for index in choices if index is not None]
    assert len(own) == 1 or (len(are_hedges) < most and not any(are_hedges[1:]))
    assert all(are_hedges[index] for index in own) or len(are_hedges) >= most
