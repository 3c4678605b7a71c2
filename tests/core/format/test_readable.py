"""Amounts and times as people read them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.amounts import amount_bytes
from sidecar.core.format.durations import duration_s
from sidecar.core.format.readable import rate_text, seconds_text, size_text

SIZES = {None: "–", 0: "0 B", 999: "999 B", 1000: "1 kB", 999_499: "999 kB", 999_500: "1 MB", 200_000_000: "200 MB"}
SIZES |= {1 << 30: "1.07 GB", 123_456_789_012: "123 GB", 10**18: "1 EB", 2345 * 10**18: "2345 EB"}
TIMES = {None: "–", 0.0: "0 s", 0.042: "0.04 s", 0.4: "0.4 s", 0.996: "1 s", 4.24: "4.2 s", 9.96: "10 s", 67.4: "67 s"}
TIMES |= {99.6: "1 min 40 s", 120.0: "2 min", 250.0: "4 min 10 s", 3599.6: "1 h", 7500.0: "2 h 5 min", 273_600.0: "3 d 4 h"}
TIMES |= {-75.0: "-75 s", 1e300: "more than 100 years", float("inf"): "more than 100 years"}


@pytest.mark.parametrize(("size_bytes", "text"), SIZES.items())
def test_a_size_has_three_digits_and_a_decimal_unit(size_bytes: int | None, text: str) -> None:
    assert size_text(size_bytes) == text


def test_a_rate_is_said_as_it_was_given() -> None:
    assert [rate_text(amount_bytes(text)) for text in ("200 MB/s", "1.5 GB/s")] == ["200 MB/s", "1.5 GB/s"]
    assert rate_text(None) == "–"


@pytest.mark.parametrize(("seconds", "text"), TIMES.items())
def test_a_time_has_one_or_two_units(seconds: float | None, text: str) -> None:
    assert seconds_text(seconds) == text


@given(st.integers(0, 999 * 10**12))
def test_a_size_is_read_back_within_half_a_percent(size_bytes: int) -> None:
    assert amount_bytes(size_text(size_bytes)) == pytest.approx(size_bytes, rel=0.0051)


@given(st.floats(0, 10**9))
def test_a_time_is_read_back_within_a_twentieth(seconds: float) -> None:
    text = seconds_text(seconds)
    assert re.fullmatch(r"[0-9.]+ (s|min|h|d)( [0-9]+ (s|min|h))?", text)
    assert duration_s(text) == pytest.approx(seconds, rel=0.05, abs=0.006)
