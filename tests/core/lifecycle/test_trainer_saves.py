from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.lifecycle.trainer_saves import News, Told, news

told = st.builds(Told, st.sampled_from([None, "a", "b"]), st.sampled_from([None, 1, 2]), st.sampled_from([None, "x", "y"]))


@given(st.lists(told, max_size=8))
def test_each_failure_of_a_trainer_is_said_once_and_its_end_once(all_told: list[Told]) -> None:
    before, fails_of = None, None
    for now in all_told:
        found, before = news(before, now), now
        process = (now.attempt, now.pid)
        fails = fails_of == process
        if found is News.FAIL:
            assert now.error is not None
            assert not fails
        elif found is News.AGAIN:
            assert now.error is None
            assert fails
        else:
            assert fails == (now.error is not None)
        fails_of = process if now.error is not None else None
