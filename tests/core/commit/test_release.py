"""Which pinned checkpoints are given back to a volume without space."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.commit.retention import PendingCopy, plan_release


def in_order(*copies: PendingCopy) -> list[PendingCopy]:
    """Return copies of which the times say which were finished later."""
    return [replace(its, later=sum(other.finished_at_s > its.finished_at_s for other in copies)) for its in copies]


times = st.integers(0, 1000).map(float)
copies = st.lists(
    st.builds(
        PendingCopy,
        name=st.uuids().map(str),
        finished_at_s=times,
        size_bytes=st.integers(0, 100),
        is_deleted=st.booleans(),
        is_sending=st.booleans(),
    ),
    max_size=8,
    unique_by=(lambda its: its.finished_at_s),
).map(lambda its: in_order(*its))
space = st.integers(0, 400)


@given(copies, space, space)
def test_what_goes_is_enough_and_no_more_than_had_to(pending: list[PendingCopy], free: int, wanted: int) -> None:
    plan = plan_release(pending, free_bytes=free, wanted_bytes=wanted)
    if plan:
        freed = [its.size_bytes for its in plan]
        assert free + sum(freed) >= wanted
        assert free + sum(freed[:-1]) < wanted


@given(copies, space, space)
def test_nothing_goes_that_the_trainer_keeps_and_never_the_newest(pending: list[PendingCopy], free: int, wanted: int) -> None:
    plan = plan_release(pending, free_bytes=free, wanted_bytes=wanted)
    assert all(its.is_deleted for its in plan)
    assert not pending or max(pending, key=lambda its: its.finished_at_s) not in plan


@given(copies, space, space)
def test_of_a_job_with_several_nodes_the_newest_two_stay(pending: list[PendingCopy], free: int, wanted: int) -> None:
    shared = [replace(its, is_shared=True) for its in pending]
    newest = sorted(shared, key=lambda its: its.finished_at_s)[-2:]
    assert not set(newest) & set(plan_release(shared, free_bytes=free, wanted_bytes=wanted))


@given(copies, space, space)
def test_what_is_not_being_sent_goes_first_and_of_that_the_oldest(pending: list[PendingCopy], free: int, wanted: int) -> None:
    plan = plan_release(pending, free_bytes=free, wanted_bytes=wanted)
    assert plan == sorted(plan, key=lambda its: (its.is_sending, its.finished_at_s))
    newest = max(pending, key=lambda its: its.finished_at_s, default=None)
    for other in pending:
        if plan and other.is_deleted and other not in plan and other is not newest:
            assert (other.is_sending, other.finished_at_s) > (plan[-1].is_sending, plan[-1].finished_at_s)


def test_nothing_goes_where_all_together_would_not_be_enough() -> None:
    old, new = in_order(
        PendingCopy("checkpoint-1", 1.0, 10, is_deleted=True), PendingCopy("checkpoint-2", 2.0, 10, is_deleted=False)
    )
    assert plan_release([new, old], free_bytes=5, wanted_bytes=16) == []
    assert plan_release([new, old], free_bytes=6, wanted_bytes=16) == [old]
    assert plan_release([new, old], free_bytes=16, wanted_bytes=16) == []
    assert plan_release([], free_bytes=0, wanted_bytes=16) == []


@given(copies, space, space)
def test_what_may_be_the_newest_stays_whatever_the_times_say(pending: list[PendingCopy], free: int, wanted: int) -> None:
    """The clock was set back before the newest was saved: its time is the earliest, and only its step is the highest."""
    newest = PendingCopy("checkpoint-900", -1.0, 50, is_deleted=True)
    assert newest not in plan_release([*pending, newest], free_bytes=free, wanted_bytes=wanted)
