from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.lifecycle.histogram import Histogram


@given(st.lists(st.floats(-10, 1e6)), st.lists(st.sampled_from([0.1, 1.0, 5.0, 60.0, 3600.0]), unique=True).map(sorted))
def test_every_bucket_counts_the_durations_up_to_its_bound(durations_s: list[float], bounds_s: list[float]) -> None:
    histogram = Histogram(bounds_s)
    for duration_s in durations_s:
        histogram.observe(duration_s)
    buckets = histogram.buckets()
    assert [bound_s for bound_s, _ in buckets] == [*bounds_s, float("inf")]
    for bound_s, count in buckets:
        assert count == sum(max(0.0, duration_s) <= bound_s for duration_s in durations_s)
    assert all(before <= after for (_, before), (_, after) in pairwise(buckets))
    assert abs(histogram.sum_s - sum(max(0.0, duration_s) for duration_s in durations_s)) < 1e-3


def test_a_duration_on_a_bound_counts_below_it() -> None:
    histogram = Histogram([1.0, 2.0])
    histogram.observe(1.0)
    assert histogram.buckets() == [(1.0, 1), (2.0, 1), (float("inf"), 1)]
