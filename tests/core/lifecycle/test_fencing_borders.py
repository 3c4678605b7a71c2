"""Fencing: the borders between two answers."""

from __future__ import annotations

import pytest

from sidecar.core.lifecycle.fencing import (
    CLOCK_STEP_S,
    KEPT_CLAIMS,
    MOST_CLAIMS,
    START_TOLERANCE_S,
    TURNS,
    TURNS_WITHIN_S,
    Arrival,
    Claim,
    Claimed,
    ending_silence_s,
    fencing_claim,
    in_order,
    next_claim,
    obsolete,
    started_later,
    takeovers_in_turns,
    waits_for_ending,
)
from sidecar.core.lifecycle.prefix_ownership import Run
from tests.core.lifecycle.test_fencing import at

NOW_S = 1.8e9


@pytest.mark.parametrize(("ahead_s", "is_later"), [(CLOCK_STEP_S, True), (CLOCK_STEP_S + 1, False)])
def test_a_claim_further_in_the_future_than_a_listed_time_can_be_tells_nothing(ahead_s: float, is_later: bool) -> None:
    claim, here = Claim(1, "0" * 16, at(NOW_S + ahead_s)), Arrival(NOW_S - 3600, NOW_S)
    assert started_later(claim, Claimed("pod", 0.0), here) is is_later


@pytest.mark.parametrize(
    ("is_ending", "after_s", "is_later"),
    [
        (False, START_TOLERANCE_S, False),
        (False, START_TOLERANCE_S + 1, True),
        (True, -START_TOLERANCE_S, False),
        (True, -START_TOLERANCE_S + 1, True),
    ],
)
def test_a_pod_started_later_if_it_did_by_more_than_the_tolerance(is_ending: bool, after_s: float, is_later: bool) -> None:
    claim, here = Claim(1, "0" * 16, at(NOW_S - 60)), Arrival(NOW_S - 100 - after_s, NOW_S)
    assert started_later(claim, Claimed("pod", 40.0), here, is_ending=is_ending) is is_later


@pytest.mark.parametrize(("first", "second"), [("1", "2"), ("2", "1")])
def test_of_two_claims_of_one_epoch_the_one_that_was_written_first_fences_the_other(first: str, second: str) -> None:
    before, late = Claim(3, first * 16, at(NOW_S)), Claim(3, second * 16, at(NOW_S + 1))
    claims = [Claim(2, "3" * 16, at(NOW_S - 1)), before, late]
    assert in_order(claims[::-1])[-1] is before
    assert (fencing_claim(claims, before), fencing_claim(claims, late)) == (None, before)


def test_the_first_claim_of_a_prefix_has_epoch_1() -> None:
    assert next_claim([], "0" * 16).epoch == 1


@pytest.mark.parametrize(("ago_s", "count"), [(TURNS_WITHIN_S, None), (TURNS_WITHIN_S - 1, TURNS)])
def test_a_takeover_counts_for_less_than_ten_minutes(ago_s: float, count: int | None) -> None:
    times = [NOW_S - ago_s, *[NOW_S] * (TURNS - 1)]
    assert takeovers_in_turns(Claim(number, "0" * 16, at(at_s)) for number, at_s in enumerate(times, 1)) == count


def test_no_claim_is_deleted_before_there_are_too_many() -> None:
    claims = [Claim(epoch, "0" * 16) for epoch in range(1, MOST_CLAIMS + 2)]
    assert [len(obsolete(claims[:count])) for count in (MOST_CLAIMS, MOST_CLAIMS + 1)] == [0, MOST_CLAIMS + 1 - KEPT_CLAIMS]


def test_on_a_slow_store_a_pod_may_be_silent_for_three_beats_and_two_looks() -> None:
    assert ending_silence_s(None, read_s=10.0) == 20.0
    assert ending_silence_s(4.0, read_s=10.0) == 32.0


@pytest.mark.parametrize(
    ("first", "is_waited_for"),
    [
        (Run("r", holder="other", ends_in_s=10.0), False),
        (Run("r", holder="other", ends_in_s=30.0), True),
        (Run("r", holder="other", ends_in_s=None), True),
        (Run("r", holder="an earlier one", ends_in_s=10.0), True),
    ],
)
def test_the_deadline_that_a_holder_named_first_counts(first: Run, is_waited_for: bool) -> None:
    now = Run("r", holder="other", ending=True, ends_in_s=50.0)
    assert waits_for_ending(first, now, me="me", watched_s=20.0, silent_s=0.0) is is_waited_for
