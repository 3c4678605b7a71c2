from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.commit.retention import surplus_steps
from sidecar.core.planning import cost
from sidecar.core.planning.cost import Policy, Prices, lost_work, put_requests, store_cost

MIB, GIB = 1 << 20, 1 << 30
S3 = Prices(gb_month_usd=0.023, thousand_put_usd=0.005, thousand_get_usd=0.0004)
ARTICLE: dict[str, Any] = {
    "cluster_hour_usd": 55.0,
    "interruptions": 1.0,
    "lost_s": 3 * 3600.0,
    "restart_s": 40 * 60.0,
    "stalls_s": 12 * 60.0,
}


def test_the_articles_totals_come_out() -> None:
    work = lost_work(**ARTICLE)
    assert (round(work.periodic_week_usd), round(work.jit_week_usd)) == (213, 37)
    assert work.saved_year_usd == pytest.approx(9152)  # "about $9,100"


@given(st.floats(0, 1e4), st.floats(0, 1e3), st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6))
def test_a_just_in_time_checkpoint_saves_the_lost_work_and_the_stalls(
    usd: float, interruptions: float, lost_s: float, restart_s: float, stalls_s: float
) -> None:
    work = lost_work(cluster_hour_usd=usd, interruptions=interruptions, lost_s=lost_s, restart_s=restart_s, stalls_s=stalls_s)
    assert work.periodic_week_usd == pytest.approx(work.jit_week_usd + work.saved_week_usd)
    assert work.saved_week_usd == pytest.approx(usd * (interruptions * lost_s + stalls_s) / 3600, rel=1e-6, abs=1e-3)
    assert work.saved_year_usd == pytest.approx(52 * work.saved_week_usd)


def test_what_just_in_time_checkpoints_cost_themselves_counts() -> None:
    work = lost_work(**ARTICLE | {"interruptions": 2.0}, jit_stalls_s=60.0)
    assert (work.periodic_s, work.jit_s) == (2 * (10_800 + 2400) + 720, 2 * 2400 + 60)


def test_a_month_under_a_policy() -> None:
    policy = Policy(interval_s=3600.0, save_steps=500, keep_newest=3, keep_every_steps=5000)
    month = store_cost(size_bytes=48 * GIB, files=10, policy=policy, resumes=4.0, prices=S3)
    assert month.saves == 720
    assert month.kept == 74  # every tenth of 720, the last of which is among the newest 3: 72 + 2
    assert month.stored_bytes == 74 * 48 * GIB
    assert month.storage_month_usd == pytest.approx(74 * 48 * 0.023)
    assert month.store_month_usd == pytest.approx(month.storage_month_usd + month.requests_month_usd)
    assert month.put_requests == 720 * put_requests(48 * GIB, files=10)
    assert month.get_requests == 4 * (2 + 10 * 154)  # files of 4.8 GiB in ranges of 32 MiB
    assert month.requests_month_usd == pytest.approx((month.put_requests * 0.005 + month.get_requests * 0.0004) / 1000)
    empty = store_cost(size_bytes=0, files=2, policy=policy, resumes=0.5, prices=S3)
    assert (empty.get_requests, empty.stored_bytes) == (2, 0)


@given(st.integers(0, 10**13), st.integers(1, 1000), st.none() | st.integers(1, 50), st.none() | st.integers(1, 10**5))
def test_a_stricter_policy_never_keeps_more(size_bytes: int, files: int, keep: int | None, every: int | None) -> None:
    def month(keep_newest: int | None, keep_every_steps: int | None) -> Any:
        policy = Policy(14_400.0, 500, keep_newest, keep_every_steps)
        return store_cost(size_bytes=size_bytes, files=files, policy=policy, resumes=1.0, prices=S3)

    asked, everything, fewest = month(keep, every), month(None, None), month(1, None)
    assert fewest.kept == 1 <= asked.kept <= everything.kept == asked.saves == 180
    assert fewest.put_requests == asked.put_requests == everything.put_requests
    assert fewest.store_month_usd <= asked.store_month_usd <= everything.store_month_usd


@pytest.mark.parametrize(
    ("size_bytes", "files", "puts"),
    [(0, 1, 3), (10 * MIB, 1, 3), (16 * MIB, 1, 3), (17 * MIB, 1, 6), (160 * MIB, 10, 12), (GIB, 1, 68)],
)
def test_requests_of_one_save(size_bytes: int, files: int, puts: int) -> None:
    assert put_requests(size_bytes, files=files) == puts


def test_more_saves_than_can_be_counted_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(interval_s=1.0, save_steps=1, keep_newest=None, keep_every_steps=None)
    with pytest.raises(ValueError, match="at least 26 s"):
        store_cost(size_bytes=1, files=1, policy=policy, resumes=0.0, prices=S3)
    monkeypatch.setattr(cost, "MOST_SAVES", 720)
    hourly = Policy(interval_s=3600.0, save_steps=1, keep_newest=None, keep_every_steps=None)
    assert store_cost(size_bytes=1, files=1, policy=hourly, resumes=0.0, prices=S3).saves == 720


@given(st.lists(st.integers(0, 1000), unique=True), st.integers(1, 10), st.none() | st.integers(1, 100))
def test_surplus_steps_are_old_and_not_kept_for_ever(steps: list[int], keep: int, every: int | None) -> None:
    surplus = surplus_steps(steps, keep_newest=keep, keep_every_steps=every)
    newest = sorted(steps)[-keep:]
    assert set(surplus) == {step for step in steps if step not in newest and not (every and step % every == 0)}
