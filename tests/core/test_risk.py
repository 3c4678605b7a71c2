from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.lifecycle import margin_s
from sidecar.core.risk import Risk, risk

known: dict[str, Any] = {
    "durable_at_s": 100.0,
    "durable_step": 40,
    "trainer_step": 55,
    "checkpoint_bytes": 1000,
    "bytes_per_s": 100.0,
    "grace_s": 30.0,
    "now_s": 160.0,
}
amounts = st.none() | st.integers(0, 10**15)
times = st.none() | st.floats(0, 1e10)


@given(times, amounts, amounts, amounts, st.none() | st.floats(0, 1e12), st.floats(0.1, 86_400), st.floats(0, 1e10))
def test_any_situation_has_a_risk_that_is_known_exactly_where_its_causes_are(
    durable_at_s: float | None,
    durable_step: int | None,
    trainer_step: int | None,
    checkpoint_bytes: int | None,
    bytes_per_s: float | None,
    grace_s: float,
    now_s: float,
) -> None:
    now = risk(
        durable_at_s=durable_at_s,
        durable_step=durable_step,
        trainer_step=trainer_step,
        checkpoint_bytes=checkpoint_bytes,
        bytes_per_s=bytes_per_s,
        grace_s=grace_s,
        now_s=now_s,
    )
    assert (now.seconds_at_risk is None) == (durable_at_s is None)
    assert (now.steps_at_risk is None) == (trainer_step is None)
    assert (now.predicted_flush_s is None) == (checkpoint_bytes is None or not bytes_per_s)
    assert (now.fits_grace is None) == (now.predicted_flush_s is None)
    assert all(value is None or value >= 0 for value in (now.seconds_at_risk, now.steps_at_risk, now.predicted_flush_s))


@given(st.floats(1, 1000), st.floats(1, 1e6), st.integers(1, 10**9))
def test_a_save_fits_if_it_is_durable_by_the_deadline_which_is_before_the_end_of_the_grace(
    grace_s: float, bytes_per_s: float, checkpoint_bytes: int
) -> None:
    now = risk(**(known | {"grace_s": grace_s, "bytes_per_s": bytes_per_s, "checkpoint_bytes": checkpoint_bytes}))
    assert now.fits_grace == (checkpoint_bytes / bytes_per_s <= grace_s - margin_s(grace_s))


def test_a_minute_and_fifteen_steps_are_at_risk() -> None:
    assert risk(**known) == Risk(seconds_at_risk=60.0, steps_at_risk=15, predicted_flush_s=10.0, fits_grace=True)


def test_without_a_durable_step_every_step_is_at_risk() -> None:
    assert risk(**(known | {"durable_step": None})).steps_at_risk == 55


def test_a_clock_that_was_set_back_puts_nothing_at_risk_rather_than_less_than_nothing() -> None:
    assert risk(**(known | {"now_s": 10.0})).seconds_at_risk == 0.0


def test_a_trainer_behind_the_durable_step_has_no_steps_at_risk() -> None:
    assert risk(**(known | {"trainer_step": 3})).steps_at_risk == 0
