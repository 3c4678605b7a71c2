from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.outcome import outcome
from trainer_hook.contract import ContractError, epoch_seconds, rfc3339

# Years 2 to 9998.
epochs = st.floats(-62_100_000_000, 253_370_000_000)


@given(epochs)
def test_a_moment_survives_its_timestamp_to_the_millisecond(epoch_s: float) -> None:
    assert abs(epoch_seconds(rfc3339(epoch_s)) - epoch_s) <= 0.0011


@given(epochs, epochs)
def test_timestamps_sort_as_text_like_the_moments_they_name(one_s: float, other_s: float) -> None:
    if one_s <= other_s:
        assert rfc3339(one_s) <= rfc3339(other_s)


_digits = st.integers(0, 99).map("{:02d}".format)
_years = st.sampled_from(["0001", "0002", "1970", "2026", "9998", "9999"])
_zones = st.sampled_from(["Z", "z", "", "+00:00", "-23:59", "+23:59", "+24:00", "-99:99"])
nearly = st.builds("{}-{}-{}T{}:{}:{}{}".format, _years, _digits, _digits, _digits, _digits, _digits, _zones)
at_the_ends = st.builds("{}T23:59:59.999999{}".format, st.sampled_from(["0001-01-01", "9999-12-31"]), _zones)


@given(st.text(max_size=40) | st.text(st.characters(), max_size=10) | nearly | at_the_ends)
def test_any_text_is_a_moment_that_can_be_written_again_or_a_contract_error(text: str) -> None:
    moment_s = outcome(epoch_seconds, text)
    if isinstance(moment_s, ContractError):
        assert repr(text) in str(moment_s)
    else:
        rfc3339(moment_s)


@pytest.mark.parametrize(
    "timestamp",
    [
        "2026-03-01T12:00:00Z",
        "2026-03-01T12:00:00.000Z",
        "2026-03-01T12:00:00.000000000Z",
        "2026-03-01T12:00:00+00:00",
        "2026-03-01T13:30:00+01:30",
        "2026-03-01T04:00:00-08:00",
    ],
)
def test_one_moment_has_one_value_in_every_time_zone_and_precision(timestamp: str) -> None:
    assert epoch_seconds(timestamp) == 1772366400.0


def test_a_timestamp_is_utc_with_milliseconds() -> None:
    assert rfc3339(1772366400.25) == "2026-03-01T12:00:00.250Z"
    assert rfc3339(0) == "1970-01-01T00:00:00.000Z"


@pytest.mark.parametrize("timestamp", ["2026-03-01T12:00:00", "2026-03-01"])
def test_a_timestamp_without_time_zone_is_refused(timestamp: str) -> None:
    with pytest.raises(ContractError, match="no time zone"):
        epoch_seconds(timestamp)


@pytest.mark.parametrize("timestamp", ["9999-12-31T23:59:59-23:00", "0001-01-01T00:00:00+01:00"])
def test_a_timestamp_whose_time_zone_leads_out_of_the_calendar_is_refused(timestamp: str) -> None:
    with pytest.raises(ContractError, match="calendar"):
        epoch_seconds(timestamp)
