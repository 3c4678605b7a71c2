from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.lifecycle.store_state import ASK_BUSY_S, LATE_S, LEAST_ASK_S, Evidence, StoreState, ask_in_s, store_state

WELL = Evidence(answered_ago_s=2.0, usual_s=0.1)
ages = st.none() | st.floats(0, 1e6)
known_stores = st.builds(
    Evidence,
    answered_ago_s=ages,
    asked_ago_s=ages,
    usual_s=st.floats(0, 100),
    still_ago_s=st.floats(0, 1e6),
    failure=st.none() | st.just("refused"),
    is_full=st.booleans(),
    refuses_uploads=st.booleans(),
)


@given(known_stores, st.floats(0.1, 86_400))
def test_a_store_answers_only_where_it_did_so_within_the_grace_period_and_nothing_is_late(
    known: Evidence, grace_s: float
) -> None:
    if store_state(known, grace_s=grace_s) is StoreState.ANSWERS:
        assert known.answered_ago_s is not None
        assert known.answered_ago_s <= grace_s
        assert known.asked_ago_s is None or known.asked_ago_s <= known.usual_s + LATE_S
        assert not any((known.failure, known.is_full, known.refuses_uploads))


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({}, StoreState.ANSWERS),
        ({"answered_ago_s": None}, StoreState.UNKNOWN),
        ({"answered_ago_s": 30.0}, StoreState.ANSWERS),
        ({"answered_ago_s": 30.1}, StoreState.UNKNOWN),
        ({"asked_ago_s": 3.0}, StoreState.ANSWERS),
        ({"asked_ago_s": 3.2}, StoreState.UNKNOWN),
        ({"asked_ago_s": 3.2, "usual_s": 5.0}, StoreState.ANSWERS),
        ({"asked_ago_s": 30.0}, StoreState.UNKNOWN),
        ({"asked_ago_s": 30.2}, StoreState.SILENT),
        ({"still_ago_s": 10.0}, StoreState.ANSWERS),
        ({"still_ago_s": 10.1}, StoreState.UNKNOWN),
        ({"failure": "gone"}, StoreState.AWAY),
        ({"refuses_uploads": True}, StoreState.REFUSES),
        ({"is_full": True, "failure": "full"}, StoreState.FULL),
    ],
)
def test_the_state_of_a_store(change: dict[str, Any], state: StoreState) -> None:
    assert store_state(replace(WELL, **change), grace_s=30.0) is state


def test_with_a_short_grace_period_a_store_is_silent_sooner() -> None:
    assert store_state(replace(WELL, asked_ago_s=5.2), grace_s=5.0) is StoreState.SILENT
    assert store_state(replace(WELL, asked_ago_s=31.0), grace_s=3600.0) is StoreState.SILENT, "and never later than this"


@given(known_stores, st.booleans(), st.floats(0.1, 86_400))
def test_the_store_is_asked_before_its_answer_is_too_old_to_count(known: Evidence, is_busy: bool, grace_s: float) -> None:
    wait_s = ask_in_s(known, is_busy=is_busy, grace_s=grace_s)
    if known.answered_ago_s is None:
        assert wait_s == 0
    else:
        assert wait_s <= max(LEAST_ASK_S, grace_s / 2)
        assert not is_busy or wait_s <= ASK_BUSY_S
        assert (wait_s > 0) or known.answered_ago_s >= LEAST_ASK_S, "a store that answers all the time is not asked"


def test_a_long_grace_period_does_not_make_the_evidence_old() -> None:
    assert ask_in_s(replace(WELL, answered_ago_s=0.0), is_busy=False, grace_s=3600.0) == 30.0
    assert ask_in_s(replace(WELL, answered_ago_s=0.0), is_busy=False, grace_s=30.0) == 15.0
    assert ask_in_s(replace(WELL, answered_ago_s=1.0), is_busy=True, grace_s=30.0) == 2.0
