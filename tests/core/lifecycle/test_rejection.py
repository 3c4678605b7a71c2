from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.lifecycle.rejection import Marked, newest_rejected

steps = st.none() | st.integers(0, 5)
marked = st.builds(Marked, st.uuids().map(str), steps, st.integers(0, 5).map(float), st.booleans())


def newest_step(durable: list[Marked]) -> int | None:
    return max((d.step for d in durable if d.step is not None), default=None)


@given(st.lists(marked))
def test_while_nothing_is_durable_every_rejected_one_counts(rejected: list[Marked]) -> None:
    assert newest_rejected(rejected, [], newest_durable_step=None) == [r.name for r in rejected]


@given(st.lists(marked), st.lists(marked))
def test_one_of_a_newer_step_that_was_marked_last_always_counts(rejected: list[Marked], durable: list[Marked]) -> None:
    last = Marked("last", (newest_step(durable) or 0) + 1, 6.0)
    assert "last" in newest_rejected([*rejected, last], durable, newest_durable_step=newest_step(durable))


@given(st.lists(marked), st.lists(marked), marked)
def test_what_becomes_durable_never_makes_another_one_count(
    rejected: list[Marked], durable: list[Marked], another: Marked
) -> None:
    before = newest_rejected(rejected, durable, newest_durable_step=newest_step(durable))
    more = [*durable, another]
    assert set(newest_rejected(rejected, more, newest_durable_step=newest_step(more))) <= set(before)


def test_a_durable_step_overtakes_older_ones_also_if_they_are_marked_again() -> None:
    durable = [Marked("checkpoint-20", 20, 20.0)]
    assert newest_rejected([Marked("checkpoint-10", 10, 99.0)], durable, newest_durable_step=20) == []
    assert newest_rejected([Marked("checkpoint-20", 20, 99.0)], durable, newest_durable_step=20) == []


def test_final_counts_until_something_finished_later_is_durable() -> None:
    final = Marked("final", None, 30.0)
    assert newest_rejected([final], [Marked("checkpoint-20", 20, 20.0)], newest_durable_step=20) == ["final"]
    assert newest_rejected([final], [Marked("checkpoint-40", 40, 40.0)], newest_durable_step=40) == []


def test_what_an_earlier_run_left_is_overtaken_by_a_lower_step_that_was_finished_later() -> None:
    left = [Marked("checkpoint-900", 900, 1.0), Marked("final", None, 2.0)]
    assert newest_rejected(left, [Marked("checkpoint-20", 20, 20.0)], newest_durable_step=20) == []


def test_when_a_checkpoint_was_downloaded_says_nothing_about_when_it_was_trained() -> None:
    final = Marked("final", None, 30.0)
    downloaded = Marked("checkpoint-20", 20, 99.0, is_restored=True)
    assert newest_rejected([final], [downloaded], newest_durable_step=20) == ["final"]


def test_the_latest_marker_of_the_durable_ones_counts_and_an_equal_time_is_not_older() -> None:
    durable = [Marked("checkpoint-10", 10, 10.0), Marked("checkpoint-20", 20, 20.0)]
    rejected = [Marked("final", None, 15.0), Marked("checkpoint-30", 30, 20.0)]
    assert newest_rejected(rejected, durable, newest_durable_step=20) == ["checkpoint-30"]
