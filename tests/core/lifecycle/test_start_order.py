"""The borders within which a pod counts as started later than another one."""

from __future__ import annotations

import pytest

from sidecar.core.lifecycle.fencing import CLOCK_STEP_S, START_TOLERANCE_S, Arrival, Claim, Claimed, started_later
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
