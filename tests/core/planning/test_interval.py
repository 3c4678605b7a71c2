from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sidecar.core.planning.interval import daly_s, lost_percent, plan_interval, young_s

seconds = st.floats(1e-3, 1e9)
restarts = st.floats(0, 1e9)


def test_known_values() -> None:
    assert young_s(12.0, 43_200.0) == pytest.approx(1018.23, abs=0.01)
    assert daly_s(12.0, 43_200.0) == pytest.approx(1010.24, abs=0.01)
    assert daly_s(100.0, 50.0) == daly_s(1000.0, 50.0) == 50.0
    assert daly_s(50.0, 50.0) == pytest.approx(young_s(50.0, 50.0) * (1 + math.sqrt(0.5) / 3 + 0.5 / 9) - 50.0)
    plan = plan_interval(stall_s=50.0, mtbf_s=500.0, restart_s=10.0)
    for lost, at_s in (
        (plan.young_lost_percent, plan.young_s),
        (plan.daly_lost_percent, plan.daly_s),
        (plan.lost_percent, plan.interval_s),
    ):
        assert lost == lost_percent(at_s, stall_s=50.0, mtbf_s=500.0, restart_s=10.0)


@given(st.floats(1, 1e4), st.floats(10, 1e5))
def test_dalys_interval_loses_no_more_than_its_neighbours(stall_s: float, times: float) -> None:
    mtbf_s = stall_s * times
    best_s = daly_s(stall_s, mtbf_s)
    lost = lost_percent(best_s, stall_s=stall_s, mtbf_s=mtbf_s, restart_s=0.0)
    for other_s in (best_s / 2, best_s * 2, young_s(stall_s, mtbf_s)):
        assert lost <= lost_percent(other_s, stall_s=stall_s, mtbf_s=mtbf_s, restart_s=0.0) + 1e-3


@given(seconds, seconds, restarts, st.floats(1e-3, 1e9))
def test_lost_time_is_a_percentage_that_a_longer_restart_never_lowers(
    stall_s: float, mtbf_s: float, restart_s: float, interval_s: float
) -> None:
    lost = lost_percent(interval_s, stall_s=stall_s, mtbf_s=mtbf_s, restart_s=restart_s)
    assert -1e-6 <= lost <= 100
    assert lost_percent(interval_s, stall_s=stall_s, mtbf_s=mtbf_s, restart_s=2 * restart_s) >= lost


@given(seconds, seconds, restarts, st.none() | st.integers(1, 10**15), st.floats(1, 1e12), st.none() | st.floats(1e-3, 1e6))
def test_every_plan_is_finite_and_carried_by_the_link(
    stall_s: float, mtbf_s: float, restart_s: float, size_bytes: int | None, bytes_per_s: float, step_s: float | None
) -> None:
    plan = plan_interval(
        stall_s=stall_s, mtbf_s=mtbf_s, restart_s=restart_s, size_bytes=size_bytes, bytes_per_s=bytes_per_s, step_s=step_s
    )
    assert math.isfinite(plan.interval_s)
    assert plan.interval_s > 0
    assert plan.interval_s >= plan.daly_s
    assert size_bytes is not None or plan.interval_s == plan.daly_s
    assert plan.is_limited_by_link == (plan.interval_s > plan.daly_s)
    assert plan.interval_s + stall_s >= (plan.upload_s or 0.0) * (1 - 1e-9)
    assert (plan.upload_s is None) == (size_bytes is None)
    assert (plan.save_steps is None) == (step_s is None)


def test_a_link_that_is_too_slow_for_the_optimum_sets_the_interval_and_whole_steps_do_not_undercut_it() -> None:
    plan = plan_interval(stall_s=12, mtbf_s=43_200, restart_s=300, size_bytes=480 * 10**9, bytes_per_s=200e6, step_s=7)
    assert plan.upload_s == 2400
    assert plan.is_limited_by_link
    assert plan.interval_s == 2388
    assert plan.save_steps == 342  # 2394 s; 341 steps were 2387 s
    assert plan.lost_percent > plan.daly_lost_percent


def test_without_an_upload_the_optimum_is_the_interval_however_short_it_is() -> None:
    plan = plan_interval(stall_s=1e-3, mtbf_s=1e-2, restart_s=0.0)
    assert plan.interval_s == plan.daly_s < 0.1


def test_an_upload_that_takes_just_as_long_as_the_optimum_does_not_limit_it() -> None:
    plan = plan_interval(stall_s=100.0, mtbf_s=50.0, restart_s=0.0, size_bytes=150, bytes_per_s=1.0, step_s=40.0)
    assert (plan.daly_s, plan.interval_s, plan.is_limited_by_link, plan.save_steps) == (50.0, 50.0, False, 1)


@given(st.floats(1, 100), st.floats(1e4, 1e6), st.integers(10**6, 10**12))
def test_the_checkpoint_on_its_way_counts_as_lost(stall_s: float, mtbf_s: float, size_bytes: int) -> None:
    assume(size_bytes / 1e9 < mtbf_s)
    alone = plan_interval(stall_s=stall_s, mtbf_s=mtbf_s, restart_s=0.0)
    sent = plan_interval(stall_s=stall_s, mtbf_s=mtbf_s, restart_s=0.0, size_bytes=size_bytes, bytes_per_s=1e9)
    assert sent.daly_lost_percent >= alone.daly_lost_percent
