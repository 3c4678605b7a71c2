from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.lifecycle.phases import margin_s
from sidecar.core.lifecycle.risk import CALM, Risk, fits_now, risk
from sidecar.core.lifecycle.save_profile import SaveProfile
from sidecar.core.lifecycle.store_state import StoreState
from sidecar.core.schedule.throughput import TELLING_BYTES

known: dict[str, Any] = {
    "seconds_at_risk": 60.0,
    "durable_step": 40,
    "trainer_step": 55,
    "usual": SaveProfile(1000, took_s=2.0, step_seconds=0.5, ranks=1),
    "bytes_per_s": 100.0,
    "grace_s": 30.0,
}
amounts = st.none() | st.integers(0, 10**15)
times = st.none() | st.floats(0, 1e10)
spans = st.none() | st.floats(0, 1e4)
saves = st.none() | st.builds(SaveProfile, st.integers(0, 10**15), took_s=spans, step_seconds=spans, ranks=st.integers(1, 64))


@given(times, amounts, amounts, saves, st.none() | st.floats(0, 1e12), st.floats(0.1, 86_400))
def test_any_situation_has_a_risk_that_is_known_exactly_where_its_causes_are(
    seconds_at_risk: float | None,
    durable_step: int | None,
    trainer_step: int | None,
    usual: SaveProfile | None,
    bytes_per_s: float | None,
    grace_s: float,
) -> None:
    now = risk(
        seconds_at_risk=seconds_at_risk,
        durable_step=durable_step,
        trainer_step=trainer_step,
        usual=usual,
        bytes_per_s=bytes_per_s,
        grace_s=grace_s,
    )
    assert (now.seconds_at_risk is None) == (seconds_at_risk is None and now.steps_at_risk != 0)
    assert (now.steps_at_risk is None) == (trainer_step is None)
    assert (now.predicted_save_s is None) == (usual is None or usual.took_s is None)
    assert (now.predicted_flush_s is None) == (usual is None or not bytes_per_s)
    assert (now.predicted_durable_s is None) == (now.fits_grace is None) == (now.predicted_flush_s is None)
    assert (now.advice is None) == (now.fits_grace is not False)
    known_ones = (now.seconds_at_risk, now.steps_at_risk, now.predicted_save_s, now.predicted_flush_s, now.predicted_durable_s)
    assert all(value is None or value >= 0 for value in known_ones)


@given(st.floats(1, 1000), st.floats(1, 1e6), st.integers(1, 10**9))
def test_a_save_fits_if_it_is_durable_by_the_deadline_which_is_before_the_end_of_the_grace(
    grace_s: float, bytes_per_s: float, size_bytes: int
) -> None:
    now = risk(**(known | {"grace_s": grace_s, "bytes_per_s": bytes_per_s, "usual": SaveProfile(size_bytes, 3.0, 0.5, 1)}))
    assert now.predicted_durable_s is not None
    assert now.fits_grace == (3.5 + size_bytes / bytes_per_s <= grace_s - margin_s(grace_s))


@given(st.floats(1, 1000), st.floats(1, 1e6), st.integers(1, 10**9))
def test_with_the_grace_period_that_is_advised_it_fits(grace_s: float, bytes_per_s: float, size_bytes: int) -> None:
    before = known | {"bytes_per_s": bytes_per_s, "usual": SaveProfile(size_bytes, 3.0, 0.5, 1)}
    now = risk(**(before | {"grace_s": grace_s}))
    if now.advice is not None:
        advised_s = float(re.findall("CKPT_GRACE_SECONDS to ([0-9]+)", now.advice)[0])
        assert advised_s > grace_s
        assert risk(**(before | {"grace_s": advised_s})).fits_grace


def test_a_minute_and_fifteen_steps_are_at_risk() -> None:
    assert risk(**known) == Risk(
        seconds_at_risk=60.0,
        steps_at_risk=15,
        store=StoreState.ANSWERS,
        predicted_save_s=2.5,
        predicted_flush_s=10.0,
        predicted_durable_s=12.5,
        upload_bytes_per_s=None,
        fits_grace=True,
        advice=None,
    )


def test_several_ranks_need_a_moment_to_agree() -> None:
    for ranks, save_s in ((1, 2.5), (2, 3.5), (8, 3.5)):
        assert risk(**(known | {"usual": SaveProfile(1000, 2.0, 0.5, ranks)})).predicted_save_s == save_s
    assert risk(**(known | {"usual": SaveProfile(1000, 2.0, None, ranks=1)})).predicted_save_s == 2.0
    assert risk(**(known | {"usual": SaveProfile(1000, None, None, ranks=1)})).predicted_durable_s == 10.0


def test_what_can_be_changed_is_named() -> None:
    short = known | {"grace_s": 10.0}
    for limited, faster in (
        (False, "raise CKPT_CONCURRENCY if the link has room"),
        (True, "lift CKPT_BANDWIDTH_LIMIT"),
    ):
        assert risk(**short, limited=limited).advice == (
            f"raise terminationGracePeriodSeconds and CKPT_GRACE_SECONDS to 17; or {faster}, "
            "or save fewer bytes; or save more often, so that less is lost when it does not fit"
        )


def test_a_rate_that_wavers_at_the_border_is_not_news_each_time() -> None:
    said: bool | None = None
    changes = 0
    for tick in range(100):
        now = risk(**(known | {"bytes_per_s": 1000 / (25.9 if tick % 2 else 26.1), "usual": SaveProfile(1000, 2.0, 0.5, 1)}))
        before, said = said, fits_now(said, now, grace_s=30.0)
        changes += before is not said
    assert (said, changes) == (False, 1)
    assert fits_now(said, risk(**known), grace_s=30.0)


def test_a_save_that_just_fits_does_unless_one_did_not_fit_before() -> None:
    now = risk(**(known | {"bytes_per_s": 1000 / 25.9}))
    assert [fits_now(before, now, grace_s=30.0) for before in (None, True, False)] == [True, True, False]
    calm_s = CALM * (30.0 - margin_s(30.0))
    calm, not_calm = (replace(now, predicted_durable_s=durable_s) for durable_s in (calm_s, calm_s + 0.01))
    assert [fits_now(False, each, grace_s=30.0) for each in (calm, not_calm)] == [True, False]
    unknown = risk(**(known | {"usual": None}))
    assert [fits_now(before, unknown, grace_s=30.0) for before in (None, True, False)] == [None, True, False]


def test_a_save_that_is_durable_just_at_the_deadline_fits() -> None:
    assert risk(**(known | {"usual": SaveProfile(2600, 2.0, 0.5, 1)})).predicted_durable_s == 30.0 - margin_s(30.0)
    assert risk(**(known | {"usual": SaveProfile(2600, 2.0, 0.5, 1)})).fits_grace


def test_without_a_durable_step_every_step_is_at_risk() -> None:
    assert risk(**(known | {"durable_step": None})).steps_at_risk == 55


def test_a_trainer_behind_the_durable_step_has_no_steps_at_risk() -> None:
    now = risk(**(known | {"trainer_step": 3}))
    assert (now.steps_at_risk, now.seconds_at_risk) == (0, 0.0), "no seconds beside no steps"


@pytest.mark.parametrize("store", StoreState)
def test_unless_the_store_answers_no_time_until_durable_is_predicted(store: StoreState) -> None:
    now = risk(**known, store=store)
    fits = {StoreState.ANSWERS: True, StoreState.UNKNOWN: None}.get(store, False)
    assert (now.fits_grace, now.predicted_durable_s is not None) == (fits, store is StoreState.ANSWERS)
    assert now.advice is None, "a longer grace period does not help"


def test_a_rate_of_a_few_bytes_predicts_and_is_not_told() -> None:
    now = risk(**(known | {"bytes_per_s": 389.0, "usual": SaveProfile(2, 0.1, None, 1)}))
    assert now.fits_grace
    assert now.upload_bytes_per_s is None
    telling = {"bytes_per_s": 2.0**20, "usual": SaveProfile(TELLING_BYTES, 0.1, None, 1)}
    assert risk(**(known | telling)).upload_bytes_per_s == 2.0**20


@pytest.mark.parametrize("before", [None, True, False])
def test_a_store_that_is_away_is_no_news_of_the_grace_period(before: bool | None) -> None:
    assert fits_now(before, risk(**known, store=StoreState.AWAY), grace_s=30.0) is before
