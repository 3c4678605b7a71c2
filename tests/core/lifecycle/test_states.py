from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.lifecycle.states import NEVER_DURABLE, PENDING, REPORTED, SETTLED, UNSAVED, State, may_follow

states = st.sampled_from(State)


@given(states)
def test_staying_is_always_allowed(state: State) -> None:
    assert may_follow(state, state)


def test_every_state_is_settled_or_pending_or_still_being_written() -> None:
    assert not SETTLED & PENDING
    assert set(State) == SETTLED | PENDING | {State.WRITING}


@pytest.mark.parametrize("state", sorted(PENDING))
def test_what_is_pending_can_become_durable_be_given_up_at_the_deadline_and_start_over(state: State) -> None:
    durable = {State.COMMITTED} & {following for following in State if may_follow(state, following)}
    assert durable or may_follow(state, State.UPLOADING)
    assert may_follow(state, State.GIVEN_UP)
    assert may_follow(state, State.FINISHED)


@pytest.mark.parametrize("state", sorted(PENDING))
def test_what_is_pending_can_be_lost_and_can_turn_out_to_be_committed(state: State) -> None:
    assert may_follow(state, State.LOST)
    assert may_follow(state, State.COMMITTED)


def test_what_is_reported_is_settled_and_not_durable() -> None:
    assert SETTLED - {State.COMMITTED} >= REPORTED


@given(states)
def test_given_up_is_final(following: State) -> None:
    assert may_follow(State.GIVEN_UP, following) == (following is State.GIVEN_UP)


@given(st.lists(states, min_size=2, max_size=12))
def test_nothing_becomes_durable_without_having_been_finished(path: list[State]) -> None:
    walk = [State.WRITING]
    for state in path:
        if may_follow(walk[-1], state):
            walk.append(state)
    if State.COMMITTED in walk:
        assert State.FINISHED in walk[: walk.index(State.COMMITTED)]


@given(st.lists(states, min_size=2, max_size=12))
def test_what_settled_moves_again_only_through_a_new_marker(path: list[State]) -> None:
    for before, after in pairwise(path):
        if before in SETTLED and after is not before and may_follow(before, after):
            assert after in {State.FINISHED, State.WRITING}


def test_the_way_of_an_ordinary_checkpoint() -> None:
    way = [State.WRITING, State.FINISHED, State.UPLOADING, State.PAUSED, State.UPLOADING, State.UPLOADED, State.COMMITTED]
    assert all(may_follow(before, after) for before, after in pairwise(way))


def test_a_durable_checkpoint_is_never_lost() -> None:
    assert not may_follow(State.COMMITTED, State.LOST)
    assert not may_follow(State.COMMITTED, State.GIVEN_UP)
    assert not may_follow(State.COMMITTED, State.SUPERSEDED)


def test_what_a_trainer_takes_for_unsaved_ended_without_becoming_durable_or_superseded() -> None:
    assert {State.SUPERSEDED} == NEVER_DURABLE - UNSAVED
