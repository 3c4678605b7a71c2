from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.schedule.backoff import CAP_S, FIRST_S, delay_s

failures = st.integers(0, 10**6)
chances = st.floats(0, 1)


@given(failures, chances)
def test_a_wait_is_never_nothing_and_never_longer_than_the_cap(count: int, chance: float) -> None:
    assert FIRST_S / 2 <= delay_s(count, random_0_1=chance) <= CAP_S


@given(failures, chances)
def test_more_failures_never_shorten_the_wait(count: int, chance: float) -> None:
    assert delay_s(count, random_0_1=chance) <= delay_s(count + 1, random_0_1=chance)


@given(failures, chances)
def test_chance_takes_off_at_most_half(count: int, chance: float) -> None:
    full = delay_s(count, random_0_1=1.0)
    assert full / 2 <= delay_s(count, random_0_1=chance) <= full
    assert delay_s(count, random_0_1=0.0) == full / 2


@given(st.integers(1, 100), st.floats(0.01, 10), st.floats(10, 1000))
def test_the_longest_wait_doubles_from_the_first_up_to_the_cap(count: int, first_s: float, cap_s: float) -> None:
    wait_s = delay_s(count, random_0_1=1.0, first_s=first_s, cap_s=cap_s)
    assert wait_s == min(cap_s, first_s * 2 ** (count - 1)) or (count > 31 and wait_s <= cap_s)


def test_a_wait_without_a_cap_doubles_thirty_times() -> None:
    waits = [delay_s(count, random_0_1=1.0, cap_s=1e12) for count in (0, 1, 30, 31, 32, 10**6)]
    assert waits == [FIRST_S, FIRST_S, FIRST_S * 2**29, *[FIRST_S * 2**30] * 3]


def test_the_first_waits_are_half_a_second_to_thirty() -> None:
    assert [delay_s(n, random_0_1=1.0) for n in range(1, 9)] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
