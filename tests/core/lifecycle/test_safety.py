from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.lifecycle.phases import Phase
from sidecar.core.lifecycle.safety import LONG_S, NOT_KNOWN, Cost, Facts, Level, Safety, cost_of_kill, cost_of_sigterm, safety
from sidecar.core.lifecycle.store_state import StoreState

WELL = Facts(
    phase=Phase.RUNNING,
    trains=True,
    sees_trainer=True,
    durable_step=40,
    steps_at_risk=15,
    seconds_at_risk=60.0,
    has_begun=True,
    fits_grace=True,
    predicted_durable_s=12.5,
    grace_s=30.0,
    store=StoreState.ANSWERS,
    store_quiet_s=2.0,
    still_s=0.0,
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
    has_begun=st.booleans(),
    fits_grace=st.none() | st.booleans(),
    predicted_durable_s=st.none() | st.floats(0, 1e6),
    grace_s=st.floats(0.1, 86_400),
    store=st.sampled_from(StoreState),
    store_quiet_s=st.none() | st.floats(0, 1e6),
    still_s=st.floats(0, 1e6),
    pending=counts,
    late=counts,
    given_up=counts,
    rejected=counts,
    quarantined=counts,
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
    is_stuck = not now.store.is_usable and (now.trains or now.pending)
    assert (answer.level is Level.DANGER) == bool(now.is_fenced or now.given_up or now.late or now.rejected or is_stuck)
    if answer.level is Level.SAFE:
        assert not answer.reasons
        if now.trains and now.phase is Phase.RUNNING:
            assert now.fits_grace, "an unknown or too long save is not safe"
            assert now.store is StoreState.ANSWERS, "safe needs a store that answers now"
            assert now.has_begun
            assert now.sees_trainer, "without the hook there is no save at SIGTERM"


@pytest.mark.parametrize(
    ("change", "level", "says"),
    [
        ({}, Level.SAFE, "fits the grace period"),
        ({"fits_grace": None}, Level.UNKNOWN, "no upload was measured"),
        ({"fits_grace": None, "durable_step": None}, Level.UNKNOWN, "no checkpoint was finished"),
        ({"fits_grace": False, "predicted_durable_s": 41.0}, Level.ATTENTION, "takes 41 s, the grace period is 30 s"),
        ({"seconds_at_risk": 5459.0}, Level.ATTENTION, "1 h 30 min of training are not durable"),
        ({"trains": False, "seconds_at_risk": 5459.0}, Level.SAFE, "Nobody trains"),
        ({"trains": False, "sees_trainer": False}, Level.UNKNOWN, "Nobody trains"),
        ({"sees_trainer": False}, Level.UNKNOWN, "nothing is saved at SIGTERM; step 40 is durable"),
        ({"store": StoreState.AWAY}, Level.DANGER, "The store cannot be used: nothing becomes durable until it answers again"),
        ({"store": StoreState.AWAY, "trains": False}, Level.ATTENTION, "store cannot be used"),
        ({"store": StoreState.SILENT}, Level.DANGER, "The store does not answer: nothing becomes durable until it does"),
        ({"store": StoreState.REFUSES}, Level.DANGER, "The store refuses uploads: nothing becomes durable until it takes them"),
        ({"store": StoreState.UNKNOWN, "store_quiet_s": 31.0}, Level.UNKNOWN, "the store has not answered for 31 s"),
        ({"store": StoreState.UNKNOWN, "store_quiet_s": None}, Level.UNKNOWN, "the store has not been asked yet"),
        ({"store": StoreState.UNKNOWN, "still_s": 12.0}, Level.UNKNOWN, "uploads have not moved for 12 s"),
        ({"store": StoreState.UNKNOWN, "trains": False}, Level.SAFE, "Nobody trains; everything finished is durable"),
        ({"store": StoreState.UNKNOWN, "trains": False, "pending": 1}, Level.UNKNOWN, "has not answered"),
        ({"has_begun": False, "trains": True}, Level.UNKNOWN, "Training has not begun"),
        ({"fails_again": True}, Level.ATTENTION, "fails again and again"),
        ({"store": StoreState.FULL, "fails_again": True}, Level.DANGER, "store is full"),
        ({"given_up": 1}, Level.DANGER, "One checkpoint of this run will not become durable"),
        ({"late": 2, "phase": Phase.FLUSHING}, Level.DANGER, "2 checkpoints will probably not"),
        ({"phase": Phase.FLUSHING, "pending": 1, "trains": False}, Level.SAFE, "fits before the deadline"),
        ({"is_fenced": True, "lease": "another pod"}, Level.DANGER, "Another pod has taken"),
        ({"free_bytes": 19 * 10**8}, Level.ATTENTION, "nearly full: 1.9 GB are free, a checkpoint takes 1 GB"),
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
        ({"store": StoreState.AWAY}, "The store cannot be used: nothing becomes durable until it answers again"),
        ({"store": StoreState.AWAY, "trains": False, "fails_again": True}, "The store cannot be used"),
        ({"fails_again": True}, "A request to the store fails again and again, although others succeed"),
        ({"store": StoreState.FULL, "fails_again": True}, "The store is full: nothing becomes durable until it has space"),
        ({"store": StoreState.FULL, "trains": False, "fails_again": True}, "The store is full"),
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


@pytest.mark.parametrize(("seconds", "text"), [(99.0, "99 s"), (110.0, "1 min 50 s"), (200.0, "3 min"), (7300.0, "2 h 1 min")])
def test_a_time_of_training_does_not_change_each_second(seconds: float, text: str) -> None:
    assert cost_of_kill(replace(WELL, seconds_at_risk=seconds)).why == f"{text} of training"


@given(facts)
def test_a_sigterm_costs_nothing_only_where_a_save_would_be_durable_in_time_and_never_more_than_a_kill(now: Facts) -> None:
    kill, sigterm = cost_of_kill(now), cost_of_sigterm(now)
    assert sigterm.lost in (kill.lost, "nothing", NOT_KNOWN)
    if sigterm.lost == "nothing" and kill.lost != "nothing":
        assert now.fits_grace
        assert now.store is StoreState.ANSWERS
        assert now.sees_trainer
    if now.trains and now.has_begun and not now.store.is_usable:
        assert sigterm.lost == kill.lost, "nothing that is saved then becomes durable"


COSTS: list[tuple[dict[str, Any], Cost, Cost]] = [
    ({}, Cost("15 steps", "60 s of training"), Cost("nothing", "durable in 12 s of 30 s grace")),
    (
        {"store": StoreState.AWAY, "fits_grace": False, "predicted_durable_s": None, "steps_at_risk": 67},
        Cost("67 steps", "60 s of training"),
        Cost("67 steps", "the store cannot be used"),
    ),
    (
        {"store": StoreState.UNKNOWN, "store_quiet_s": 9.0, "fits_grace": None},
        Cost("15 steps", "60 s of training"),
        Cost(NOT_KNOWN, "the store has not answered for 9 s"),
    ),
    (
        {"fits_grace": False, "predicted_durable_s": 41.0},
        Cost("15 steps", "60 s of training"),
        Cost("15 steps", "needs 41 s, the grace period is 30 s"),
    ),
    (
        {"steps_at_risk": 0, "seconds_at_risk": 0.0},
        Cost("nothing", "everything trained is durable"),
        Cost("nothing", "durable in 12 s of 30 s grace"),
    ),
    (
        {"sees_trainer": False, "steps_at_risk": None, "seconds_at_risk": None, "durable_step": None},
        Cost(NOT_KNOWN, "no checkpoint was finished yet"),
        Cost(NOT_KNOWN, "without the hook nothing is saved then"),
    ),
    ({"has_begun": False}, *[Cost("nothing", "training has not begun")] * 2),
    ({"trains": False, "steps_at_risk": 3, "pending": 1}, *[Cost("3 steps", "nobody trains")] * 2),
    ({"trains": False, "steps_at_risk": 3}, *[Cost("nothing", "nobody trains")] * 2),
    (
        {"steps_at_risk": None, "seconds_at_risk": 500.0, "sees_trainer": False},
        Cost("8 min", "of training"),
        Cost("8 min", "without the hook nothing is saved then"),
    ),
    (
        {"fits_grace": None, "predicted_durable_s": None, "steps_at_risk": 1},
        Cost("1 step", "60 s of training"),
        Cost(NOT_KNOWN, "no upload was measured yet"),
    ),
]


@pytest.mark.parametrize(("change", "kill", "sigterm"), COSTS)
def test_what_a_kill_and_a_sigterm_cost(change: dict[str, Any], kill: Cost, sigterm: Cost) -> None:
    assert (cost_of_kill(replace(WELL, **change)), cost_of_sigterm(replace(WELL, **change))) == (kill, sigterm)
