from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.format.durations import LONGEST_S, duration_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("90s", 90.0),
        ("2m", 120.0),
        ("2min", 120.0),
        ("1h30m", 5400.0),
        ("1.5 d", 129_600.0),
        (" 3H 5S ", 10_805.0),
        ("250ms", 0.25),
        ("1w", 604_800.0),
        ("0", 0.0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", " ", "s", "-5s", "5x", "5s5", "1e3s", "inf", "nan", "2 m x", "٢m", ".5s", "1..5s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a duration such as"):
        duration_s(text)


def test_more_than_a_century_is_refused() -> None:
    assert duration_s("36600d") == LONGEST_S
    for text in ("36600d 1ms", "6000w"):
        with pytest.raises(ValueError, match="at most 100 years"):
            duration_s(text)


@given(st.text(alphabet="0123456789.smhdw in") | st.text())
def test_any_text_is_a_duration_within_the_limits_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert 0 <= duration_s(text) <= LONGEST_S
