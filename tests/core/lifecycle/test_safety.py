from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.lifecycle.phases import Phase
from sidecar.core.lifecycle.safety import LONG_S, Facts, Level, Safety, safety

WELL = Facts(
    phase=Phase.RUNNING,
    trains=True,
    sees_trainer=True,
    durable_step=40,
    steps_at_risk=15,
    seconds_at_risk=60.0,
    fits_grace=True,
    predicted_durable_s=12.5,
    grace_s=30.0,
    pending=0,
    free_bytes=50 * 10**9,
    volume_bytes=100 * 10**9,
    checkpoint_bytes=10**9,
)
counts = st.integers(0, 3)
sizes = st.integers(0, 10**13)
facts = st.builds(
    Facts,
    phase=st.sampled_from(Phase),
    trains=st.booleans(),
    sees_trainer=st.booleans(),
    durable_step=st.none() | counts,
    steps_at_risk=st.none() | counts,
    seconds_at_risk=st.none() | st.floats(0, 1e6),
    fits_grace=st.none() | st.booleans(),
    predicted_durable_s=st.none() | st.floats(0, 1e6),
    grace_s=st.floats(0.1, 86_400),
    pending=counts,
    late=counts,
    given_up=counts,
    rejected=counts,
    quarantined=counts,
    trouble=st.none() | st.just("refused"),
    is_full=st.booleans(),
    fails_again=st.booleans(),
    lease=st.none() | st.just("waits"),
    is_fenced=st.booleans(),
    is_resuming=st.booleans(),
    free_bytes=st.none() | sizes,
    volume_bytes=st.none() | sizes,
    checkpoint_bytes=st.none() | sizes,
)


@given(facts)
def test_any_situation_has_an_answer_that_is_never_safer_than_its_facts(now: Facts) -> None:
    answer = safety(now)
    assert answer.headline
    assert answer.headline not in answer.reasons
    is_stuck = (now.trouble or now.is_full) and (now.trains or now.pending)
    assert (answer.level is Level.DANGER) == bool(now.is_fenced or now.given_up or now.late or now.rejected or is_stuck)
    if answer.level is Level.SAFE:
        assert not answer.reasons
        if now.trains and now.phase is Phase.RUNNING:
            assert now.fits_grace, "an unknown or too long save is not safe"
            assert now.sees_trainer, "without the hook there is no save at SIGTERM"


@pytest.mark.parametrize(
    ("change", "level", "says"),
    [
        ({}, Level.SAFE, "fits the grace period"),
        ({"fits_grace": None}, Level.UNKNOWN, "no upload was measured"),
        ({"fits_grace": None, "durable_step": None}, Level.UNKNOWN, "no checkpoint was finished"),
        ({"fits_grace": False, "predicted_durable_s": 41.0}, Level.ATTENTION, "takes 41 s, the grace period is 30 s"),
        ({"seconds_at_risk": 5400.0}, Level.ATTENTION, "90 min of training are not durable"),
        ({"trains": False, "seconds_at_risk": 5400.0}, Level.SAFE, "Nobody trains"),
        ({"trains": False, "sees_trainer": False}, Level.UNKNOWN, "Nobody trains"),
        ({"sees_trainer": False}, Level.UNKNOWN, "nothing is saved at SIGTERM; step 40 is durable"),
        ({"trouble": "AccessDenied"}, Level.DANGER, "store cannot be used"),
        ({"trouble": "AccessDenied", "trains": False}, Level.ATTENTION, "store cannot be used"),
        ({"fails_again": True}, Level.ATTENTION, "fails again and again"),
        ({"is_full": True, "fails_again": True}, Level.DANGER, "store is full"),
        ({"given_up": 1}, Level.DANGER, "One checkpoint of this run will not become durable"),
        ({"late": 2, "phase": Phase.FLUSHING}, Level.DANGER, "2 checkpoints will probably not"),
        ({"phase": Phase.FLUSHING, "pending": 1, "trains": False}, Level.SAFE, "fits before the deadline"),
        ({"is_fenced": True, "lease": "another pod"}, Level.DANGER, "Another pod has taken"),
        ({"free_bytes": 19 * 10**8}, Level.ATTENTION, "nearly full: 1.9 GB are free, a checkpoint takes 1.0 GB"),
        ({"free_bytes": 5 * 10**8, "checkpoint_bytes": None}, Level.ATTENTION, "nearly full: 500 MB are free"),
        ({"free_bytes": 10**9, "checkpoint_bytes": None}, Level.SAFE, "fits"),
        ({"free_bytes": 2 * 10**9, "volume_bytes": 10**13}, Level.SAFE, "fits"),
        ({"is_resuming": True}, Level.UNKNOWN, "fetched to resume"),
    ],
)
def test_the_headline_says_it(change: dict[str, Any], level: Level, says: str) -> None:
    answer = safety(replace(WELL, **change))
    assert answer.level is level
    assert says in answer.headline


FITS: list[dict[str, Any]] = [{}, {"pending": 1}, {"durable_step": None}, {"seconds_at_risk": LONG_S}]


@pytest.mark.parametrize(
    ("changed", "headline"),
    [
        ({"phase": Phase.STARTING, "trains": False}, "The sidecar is starting"),
        ({"phase": Phase.STARTING, "is_resuming": True}, "A checkpoint is being fetched to resume from"),
        ({"phase": Phase.DONE, "trains": False}, "The sidecar has ended: everything finished is durable"),
        ({"phase": Phase.DRAINING}, "The pod is ending: everything finished is durable"),
        ({"phase": Phase.FLUSHING, "pending": 1}, "The pod is ending: everything finished fits before the deadline"),
        ({"sees_trainer": False}, "No hook is seen, so nothing is saved at SIGTERM; step 40 is durable"),
        (
            {"sees_trainer": False, "durable_step": None},
            "No hook is seen, so nothing is saved at SIGTERM; nothing of this pod is durable yet",
        ),
        *((known, "Training is safe: a save at SIGTERM fits the grace period") for known in FITS),
        ({"trains": False, "pending": 2}, "Nobody trains; 2 checkpoints on the way to the store"),
        ({"trains": False}, "Nobody trains; everything finished is durable"),
        ({"fits_grace": None}, "Not known yet: no upload was measured yet"),
        ({"fits_grace": None, "durable_step": None}, "Not known yet: no checkpoint was finished yet"),
        ({"durable_step": None, "pending": 1}, "The first checkpoint is on its way; a save at SIGTERM fits the grace period"),
    ],
)
def test_a_calm_situation_is_said_in_one_sentence(changed: dict[str, Any], headline: str) -> None:
    assert safety(replace(WELL, **changed)).headline == headline


@pytest.mark.parametrize(
    ("changed", "headline"),
    [
        (
            {"is_fenced": True, "lease": "another pod"},
            "Another pod has taken this run over: nothing that is trained here becomes durable",
        ),
        ({"trouble": "AccessDenied"}, "The store cannot be used: nothing becomes durable until it answers again"),
        ({"trouble": "AccessDenied", "trains": False, "fails_again": True}, "The store cannot be used"),
        ({"fails_again": True}, "A request to the store fails again and again, although others succeed"),
        ({"is_full": True, "fails_again": True}, "The store is full: nothing becomes durable until it has space"),
        ({"is_full": True, "trains": False, "fails_again": True}, "The store is full"),
        ({"lease": "another pod"}, "Uploads wait for another pod of this run"),
        ({"free_bytes": 5 * 10**8, "checkpoint_bytes": None}, "The volume is nearly full: 500 MB are free"),
    ],
)
def test_what_is_wrong_is_said_once(changed: dict[str, Any], headline: str) -> None:
    answer = safety(replace(WELL, **changed))
    assert (answer.headline, answer.reasons) == (headline, ())


def test_what_is_less_important_is_a_reason() -> None:
    answer = safety(replace(WELL, given_up=1, late=1, fails_again=True))
    assert answer == Safety(
        Level.DANGER,
        "One checkpoint of this run will not become durable",
        (
            "One checkpoint will probably not be durable by the deadline",
            "A request to the store fails again and again, although others succeed",
        ),
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, " an unknown time, "), (119.0, " 119 s"), (120.0, " 2 min"), (7199.0, " 120 min"), (7200.0, " 2.0 h")],
)
def test_a_duration_has_the_unit_of_its_size(seconds: float | None, text: str) -> None:
    now = replace(WELL, fits_grace=False, predicted_durable_s=seconds)
    answer = safety(now)
    assert any(text in sentence for sentence in (answer.headline, *answer.reasons))
