"""Whether to go on waiting for a sidecar that does not answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.lifecycle.start_wait import ENDED_S, Wait, wait_for_start

TIMES = st.floats(0, 1000)


@given(TIMES, TIMES)
def test_a_sidecar_that_never_lived_is_waited_for_until_the_time_is_over(now_s: float, until_s: float) -> None:
    assert wait_for_start(now_s=now_s, until_s=until_s, alive_at_s=None) is (Wait.OVER if now_s >= until_s else Wait.GOES_ON)


@given(TIMES, TIMES, st.floats(0, ENDED_S, exclude_max=True))
def test_a_sidecar_that_lived_a_moment_ago_has_not_ended(now_s: float, until_s: float, silent_s: float) -> None:
    assert wait_for_start(now_s=now_s, until_s=until_s, alive_at_s=now_s - silent_s / 2) is not Wait.ENDED


@given(TIMES, TIMES)
def test_one_that_is_silent_for_longer_has_ended(now_s: float, until_s: float) -> None:
    assert wait_for_start(now_s=now_s + ENDED_S, until_s=until_s, alive_at_s=now_s - 0.001) is Wait.ENDED
