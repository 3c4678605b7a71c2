"""Hedging: exact values, and the borders between two answers."""

from __future__ import annotations

import pytest

from sidecar.core.schedule import hedging
from sidecar.core.schedule.hedging import Flow, Quiet


@pytest.mark.parametrize(
    ("took", "hurried", "late_s"),
    [
        ([], False, 1.5),
        ([], True, 0.75),
        ([0.1] * 10, False, 0.75),
        ([0.1] * 10, True, 0.375),
        ([0.4] * 8 + [0.5, 0.6], False, 1.2),
        ([0.4] * 9 + [0.5, 0.6], False, 1.0),
        ([0.4] * 9 + [5.0], False, 1.9),
        ([0.4] * 9 + [5.0], True, 1.15),
        ([1.0] * 5 + [8.0] * 5, False, 12.0),
    ],
)
def test_when_a_request_is_late(took: list[float], hurried: bool, late_s: float) -> None:
    assert hedging.late_s(took, hurried=hurried) == pytest.approx(late_s)
    assert hurried or hedging.late_s(took) == pytest.approx(late_s)


def test_waits_of_further_tries_double_ten_times_and_costly_ones_grow_fourfold_five_times() -> None:
    def waits(tries: tuple[int, ...], *, is_costly: bool) -> list[float]:
        return [hedging.next_try_s(1.0, tries=count, quiet_before_s=0.0, most_s=1e9, is_costly=is_costly) for count in tries]

    assert waits((1, 2, 3, 11, 12, 13), is_costly=False) == [1, 1, 2, 512, 1024, 1024]
    assert waits((1, 2, 5, 6, 7), is_costly=True) == [1, 4, 256, 1024, 1024]
    assert (hedging.at_once(is_costly=True), hedging.at_once(is_costly=False)) == (hedging.FEW_AT_ONCE, hedging.AT_ONCE)


def test_a_silence_lasts_until_it_is_not_confirmed_in_time() -> None:
    quiet = Quiet(most_s=60)
    quiet.fell_silent(since_s=0.0, now_s=1.0)
    quiet.fell_silent(since_s=60.5, now_s=61.0)
    assert quiet.before_s(121.0) == 121.0
    assert quiet.before_s(121.5) == 0.0
    quiet.fell_silent(since_s=121.0, now_s=122.0)
    assert quiet.before_s(123.0) == 2.0
    assert quiet.before_s(120.0) == 0.0


def test_a_sign_of_life_at_the_beginning_of_a_silence_ends_it() -> None:
    quiet = Quiet(most_s=60)
    quiet.fell_silent(since_s=1000.0, now_s=1002.0)
    quiet.heard_s = 1000.0
    assert quiet.before_s(1003.0) == 0.0
    quiet.fell_silent(since_s=1001.0, now_s=1003.0)
    assert quiet.before_s(1004.0) == 3.0


def test_the_flow_is_that_of_the_window() -> None:
    flow = Flow()
    for now_s, moved_bytes in ((0.0, 0), (1.0, 300), (4.0, 400)):
        flow.record(moved_bytes, now_s=now_s)
    assert flow.bytes_per_s(500, now_s=5.0) == 50.0
    later = Flow()
    later.record(0, now_s=10.0)
    assert later.bytes_per_s(100, now_s=10.5) is None
    for now_s in (10.05, 13.05):
        later.record(100, now_s=now_s)
    assert later.bytes_per_s(200, now_s=14.0) == 50.0, "the sample after 0.05 s is left out"
    sampled = Flow()
    for now_s, moved_bytes in ((0.0, 0), (hedging.FLOW_EVERY_S, 100), (hedging.FLOW_EVERY_S + hedging.FLOW_S, 200)):
        sampled.record(moved_bytes, now_s=now_s)
    assert sampled.bytes_per_s(600, now_s=5.1) == pytest.approx(100.0)


def test_a_silence_grows_with_each_connection_and_on_a_slow_link() -> None:
    def silent_s(tries: int, *, hurried: bool = False) -> float:
        return hedging.silent_s(tries=tries, quiet_before_s=0.0, most_s=1e9, bytes_per_s=None, connections=1, hurried=hurried)

    assert [silent_s(tries) for tries in (0, 1, 9, 10, 11)] == [1.5, 3.0, 768.0, 1536.0, 1536.0]
    assert silent_s(0, hurried=True) == 0.75
    of_a_body = {"tries": 0, "quiet_before_s": 0.0, "most_s": 60.0}
    assert hedging.silent_s(**of_a_body, bytes_per_s=None, connections=1) == 1.5  # type: ignore[arg-type]
    assert [hedging.step_s(rate, connections=1) for rate in (None, 24_999.0, 25_000.0)] == [0.0, 0.0, 4.0]
    assert [hedging.step_s(1 << 20, connections=count) for count in (0, 1, 2, 99)] == [0.25, 0.25, 0.5, 4.0]


@pytest.mark.parametrize(
    ("moved_bytes", "in_s", "moves"),
    [(0, 0.0, False), (0, 1.0, False), (1, 0.0001, True), (4096, 1.5, True), (4095, 1.5, False)],
)
def test_what_moves(moved_bytes: int, in_s: float, moves: bool) -> None:
    assert hedging.is_moving(moved_bytes, in_s=in_s) is moves


@pytest.mark.parametrize(("requests", "of_bodies", "of_others"), [(0, 1, 2), (11, 1, 2), (12, 2, 3), (60, 10, 15)])
def test_how_many_hedges_are_in_flight_at_once(requests: int, of_bodies: int, of_others: int) -> None:
    for most, is_body in ((of_bodies, True), (of_others, False)):
        answers = [
            hedging.may_hedge(hedges=hedges, requests=requests, is_quiet=True, is_whole_body=is_body)
            for hedges in (most - 1, most)
        ]
        assert answers == [True, False]
    assert hedging.may_hedge(hedges=99, requests=requests, is_quiet=False)


def test_a_request_fails_at_its_limit_and_a_body_later_if_the_store_was_heard_within_it() -> None:
    def given_up(waited_s: float, *, is_body: bool, heard_s_ago: float) -> bool:
        return hedging.is_given_up(waited_s, most_s=60.0, is_body=is_body, heard_s_ago=heard_s_ago)

    assert [given_up(waited_s, is_body=False, heard_s_ago=0.0) for waited_s in (59.0, 60.0)] == [False, True]
    assert [given_up(60.0, is_body=True, heard_s_ago=ago_s) for ago_s in (59.0, 60.0)] == [False, True]
    assert [given_up(waited_s, is_body=True, heard_s_ago=0.0) for waited_s in (599.0, 600.0)] == [False, True]


def test_errors_of_the_server_may_be_undone_by_another_try() -> None:
    assert [hedging.may_be_undone(status) for status in (404, 409, 412, 499, 500, 503)] == [
        False,
        True,
        True,
        False,
        True,
        True,
    ]


def test_deadlines_of_connections_and_copies() -> None:
    assert [hedging.connect_within_s(failures, first_s=1.0, most_s=1e9) for failures in (0, 1, 10, 11)] == [1, 2, 1024, 1024]
    assert hedging.copy_within_s(10**8) == 2.5
    assert hedging.size_class(1 << 20) == 21
