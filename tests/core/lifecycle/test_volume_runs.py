from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.lifecycle.volume_runs import MOST_RUNS, VolumeRun, decode_runs, encode_runs, is_same_run, taken_over

runs = st.sampled_from([VolumeRun("s3://b/x", "ns/a"), VolumeRun("s3://b/y", "ns/b"), VolumeRun("s3://b/z", None)])
versions = st.frozensets(st.sampled_from([f"{number}-1-1" for number in range(6)]))


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        (VolumeRun("s3://b/x", "ns/a"), True),
        (VolumeRun("s3://b/x", "ns/b"), True),  # the prefix's own check refuses it, if it is another job
        (VolumeRun("s3://b/x", None), True),
        (VolumeRun("s3://b/y", "ns/a"), True),  # its store has moved
        (VolumeRun("s3://b/y", "ns/b"), False),
        (VolumeRun("s3://b/y", None), False),
    ],
)
def test_a_run_is_known_by_its_prefix_or_its_name(other: VolumeRun, is_same: bool) -> None:
    assert is_same_run(VolumeRun("s3://b/x", "ns/a"), other) is is_same
    assert is_same_run(other, VolumeRun("s3://b/x", "ns/a")) is is_same


def test_two_runs_without_a_name_are_not_one_for_that() -> None:
    assert not is_same_run(VolumeRun("s3://b/x", None), VolumeRun("s3://b/y", None))


@given(st.lists(st.tuples(runs, versions), max_size=8))
def test_each_run_takes_what_it_left_and_nothing_of_another(lives: list[tuple[VolumeRun, frozenset[str]]]) -> None:
    """Each life finds what is on the volume, and writes what was not there before."""
    known: list[VolumeRun] = []
    owner: dict[str, VolumeRun] = {}
    for me, present in lives:
        owner = {version: run for version, run in owner.items() if version in present}
        known = decode_runs(encode_runs(taken_over(known, me, owner)))
        assert known[0] == me
        foreign = frozenset().union(*(run.versions for run in known[1:]))
        assert foreign == {version for version, run in owner.items() if run != me}
        owner |= dict.fromkeys(present - set(owner), me)


def test_what_an_earlier_version_of_the_sidecar_left_counts_as_the_runs_own() -> None:
    assert taken_over([], VolumeRun("s3://b/x", "ns/a"), ["1-1-1"]) == [VolumeRun("s3://b/x", "ns/a")]


def test_of_many_runs_the_latest_are_remembered() -> None:
    known: list[VolumeRun] = []
    for number in range(MOST_RUNS + 5):
        known = taken_over(known, VolumeRun(f"s3://b/{number}", None), [f"{left}-1-1" for left in range(number)])
    assert len(known) == MOST_RUNS
    assert known[1].store == f"s3://b/{MOST_RUNS + 3}"


@pytest.mark.parametrize(
    "raw", [None, b"", b"{", b"[]", b'{"runs": 3}', b'{"runs": [3, {"store": 3}, {}]}', b'{"runs": {"store": "x"}}', b"\xff"]
)
def test_a_malformed_record_says_nothing(raw: bytes | None) -> None:
    assert decode_runs(raw) == []


def test_fields_of_another_type_are_left_out() -> None:
    unnamed = VolumeRun("x", None, versions=frozenset("a"))
    assert decode_runs(b'{"runs": [{"store": "x", "name": 3, "versions": ["a", 3]}]}') == [unnamed]
