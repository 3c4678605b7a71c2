from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.lifecycle.trained_time import MOST_SPANS, TrainedTime

observations = st.lists(st.tuples(st.floats(0, 1000), st.booleans()), max_size=300)


def observed(gaps: list[tuple[float, bool]]) -> tuple[TrainedTime, list[tuple[float, bool]]]:
    """Return the time after observations that are these seconds apart, and the observations with their times."""
    trained, now_s, seen = TrainedTime(), 1000.0, []
    for gap_s, trains in gaps:
        now_s += gap_s
        trained = trained.seen(trains=trains, now_s=now_s)
        seen.append((now_s, trains))
    return trained, seen


@given(observations, st.floats(0, 1e5))
def test_only_time_between_two_observations_of_training_counts(gaps: list[tuple[float, bool]], later_s: float) -> None:
    trained, seen = observed(gaps)
    end_s = seen[-1][0] + later_s if seen else 1000.0
    expected_s = sum(after[0] - before[0] for before, after in pairwise(seen) if before[1] and after[1])
    expected_s += later_s if seen and seen[-1][1] else 0.0
    counted_s = trained.between_s(0.0, end_s)
    assert len(trained.spans) <= MOST_SPANS
    if sum(trains for _, trains in seen) <= MOST_SPANS:
        assert abs(counted_s - expected_s) < 1e-3
    else:  # joined spans hold the pause between them
        assert counted_s >= expected_s - 1e-3


@given(observations, st.floats(0, 1e5), st.floats(0, 1e5), st.floats(0, 1e5))
def test_what_is_at_risk_grows_with_training_and_stands_still_without(
    gaps: list[tuple[float, bool]], durable_at_s: float, finished_at_s: float, later_s: float
) -> None:
    trained, seen = observed(gaps)
    now_s = seen[-1][0] if seen else 1000.0

    def at_risk_s(finished_at_s: float | None, now_s: float) -> float:
        return trained.at_risk_s(durable_at_s=durable_at_s, finished_at_s=finished_at_s, now_s=now_s)

    for finished in (None, finished_at_s):
        before_s, after_s = at_risk_s(finished, now_s), at_risk_s(finished, now_s + later_s)
        assert 0 <= before_s <= after_s
        if not trained.runs and (finished is None or finished <= now_s):
            assert before_s == after_s
    if not trained.runs:
        assert at_risk_s(None, now_s) == 0, "there is nothing left to lose"


def test_a_trainer_that_waits_for_its_node_loses_nothing_meanwhile() -> None:
    trained = TrainedTime().seen(trains=True, now_s=100.0).seen(trains=True, now_s=160.0).seen(trains=False, now_s=161.0)
    again = trained.seen(trains=True, now_s=1000.0)
    assert again.at_risk_s(durable_at_s=130.0, finished_at_s=None, now_s=1010.0) == 30.0 + 10.0


def test_a_trainer_that_began_before_it_was_seen_has_trained_since_then() -> None:
    assert TrainedTime().seen(trains=True, now_s=100.0, began_s=90.0).spans == ((90.0, 100.0),)
    assert TrainedTime().seen(trains=True, now_s=100.0, began_s=110.0).spans == ((100.0, 100.0),)


def test_once_the_trainer_has_ended_no_more_than_the_finished_state_is_at_risk() -> None:
    trained = TrainedTime().seen(trains=True, now_s=100.0).seen(trains=True, now_s=160.0).seen(trains=False, now_s=161.0)
    assert trained.at_risk_s(durable_at_s=110.0, finished_at_s=130.0, now_s=161.0) == 20.0
    assert trained.at_risk_s(durable_at_s=110.0, finished_at_s=170.0, now_s=150.0) == 40.0, "the clock was set back"


def test_a_clock_that_was_set_back_puts_nothing_at_risk_rather_than_less_than_nothing() -> None:
    trained = TrainedTime().seen(trains=True, now_s=100.0).seen(trains=True, now_s=90.0)
    assert trained.at_risk_s(durable_at_s=100.0, finished_at_s=None, now_s=10.0) == 0.0


def test_the_two_oldest_of_too_many_spans_are_joined() -> None:
    trained = TrainedTime()
    for number in range(MOST_SPANS + 3):
        trained = trained.seen(trains=True, now_s=10.0 * number).seen(trains=True, now_s=10.0 * number + 1)
        trained = trained.seen(trains=False, now_s=10.0 * number + 2)
    assert len(trained.spans) == MOST_SPANS
    assert trained.spans[:2] == ((0.0, 31.0), (40.0, 41.0))
    assert trained.spans[-1] == (10.0 * (MOST_SPANS + 2), 10.0 * (MOST_SPANS + 2) + 1)
