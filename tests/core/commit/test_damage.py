"""What is known of an object that does not arrive as it was recorded."""

from __future__ import annotations

import hashlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.commit.damage import (
    FULL_PATIENCE_S,
    LEAST_READS,
    LONGEST_PAUSE_S,
    SHORT_PATIENCE_S,
    is_content_of,
    is_known_bad,
    is_patience_over,
    is_record_in_force,
    pause_s,
)

came = st.lists(st.sampled_from(["crc64nvme 1", "crc64nvme 2"]), min_size=1, max_size=6)


@given(came, st.sets(st.text(max_size=3), max_size=2), st.text(max_size=3))
def test_no_number_of_damaged_reads_makes_an_object_bad_that_the_store_says_is_as_recorded(
    came: list[str], others: set[str], etag: str
) -> None:
    assert not is_known_bad(size_bytes=5, etags={*others, etag}, there=(5, etag), came=came)


@given(came, st.integers(0, 9), st.text(max_size=3))
def test_an_object_that_is_missing_or_of_another_size_is_bad(came: list[str], size_bytes: int, etag: str) -> None:
    assert is_known_bad(size_bytes=size_bytes, etags={etag}, there=None, came=came)
    assert is_known_bad(size_bytes=size_bytes, etags={etag}, there=(size_bytes + 1, etag), came=came)


@pytest.mark.parametrize(
    ("came", "etags", "is_bad"),
    [
        (["x"], {"a"}, False),
        (["x", "x"], {"a"}, True),
        (["x", "y"], {"a"}, False),
        (["y", "x", "x"], {"a"}, True),
        (["x", "x"], {"a", "b"}, False),
        (["x", "x"], {""}, False),
        (["x", "x"], set(), False),
        (["x", "x"], None, True),
        (["x", "y"], None, False),
        (["x"], None, False),
    ],
)
def test_another_etag_is_damage_only_with_the_same_wrong_content_twice(
    came: list[str], etags: set[str] | None, is_bad: bool
) -> None:
    assert is_known_bad(size_bytes=1, etags=etags, there=(1, "b"), came=came) is is_bad


@given(st.binary(max_size=50), st.binary(max_size=50))
def test_bytes_are_proven_by_their_md5_and_by_nothing_else(raw: bytes, other: bytes) -> None:
    etag = hashlib.md5(raw).hexdigest()
    assert is_content_of(raw, size_bytes=len(raw), etag=etag)
    assert is_content_of(other, size_bytes=len(other), etag=etag) == (raw == other)
    assert not is_content_of(raw, size_bytes=len(raw), etag=f"{etag}-1"), "of parts"
    assert not is_content_of(raw, size_bytes=len(raw), etag="1f-2a-3")


@given(st.integers(1, 1000))
def test_pauses_grow_to_a_bound(reads: int) -> None:
    assert 0 < pause_s(reads) <= pause_s(reads + 1) <= LONGEST_PAUSE_S


def test_a_minute_of_damage_is_sat_out_with_few_reads() -> None:
    now_s, reads = 0.0, 1
    for reads in itertools.count(1):
        if is_patience_over(reads=reads, since_first_s=now_s, patience_s=FULL_PATIENCE_S):
            break
        now_s += pause_s(reads)
    assert now_s > 60 + LONGEST_PAUSE_S
    assert reads < 20


def test_slow_reads_are_repeated_all_the_same() -> None:
    assert not is_patience_over(reads=LEAST_READS - 1, since_first_s=1e6, patience_s=SHORT_PATIENCE_S)
    assert is_patience_over(reads=LEAST_READS, since_first_s=1e6, patience_s=SHORT_PATIENCE_S)


@pytest.mark.parametrize(
    ("reads", "wait_s"), [(0, 0.5), (1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (5, 8.0), (6, 8.0), (10_000, 8.0)]
)
def test_the_pause_between_reads_doubles_up_to_eight_seconds(reads: int, wait_s: float) -> None:
    assert pause_s(reads) == wait_s


def test_the_last_two_reads_decide_and_patience_ends_on_time() -> None:
    def is_bad(*came: str) -> bool:
        return is_known_bad(size_bytes=5, etags={"e"}, there=(5, "other"), came=came)

    assert is_bad("a", "b", "c", "c")
    assert not is_bad("a", "c", "c", "b")
    assert is_patience_over(reads=LEAST_READS, since_first_s=SHORT_PATIENCE_S, patience_s=SHORT_PATIENCE_S)


def test_content_of_another_length_is_not_the_recorded_one() -> None:
    etag = hashlib.md5(b"x", usedforsecurity=False).hexdigest()
    assert is_content_of(b"x", size_bytes=1, etag=etag)
    assert not is_content_of(b"x", size_bytes=2, etag=etag)


def test_a_record_of_a_missing_object_is_in_force_until_the_object_is_there() -> None:
    assert is_record_in_force(None, {"a", "b"}), "other damage does not end by itself"
    assert is_record_in_force("a", {"b"})
    assert not is_record_in_force("a", {"a", "b"})
