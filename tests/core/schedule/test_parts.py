from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sidecar.core.schedule.parts import (
    DEFAULT_PART_BYTES,
    ENOUGH_PARTS,
    LARGEST_PART_BYTES,
    LEAST_PARTS,
    LONGEST_S,
    MAX_PARTS,
    MIB,
    MIN_PART_BYTES,
    NEAR_PART_BYTES,
    equal_parts,
    largest_file_bytes,
    max_parts_after_refusal,
    most_bytes,
    part_ranges,
    part_size,
    range_bytes,
    upload_ranges,
    usual_part_bytes,
)

TIB = 1 << 40

sizes = st.integers(0, 50 * TIB)


def test_the_limits_are_those_of_s3() -> None:
    assert (MIN_PART_BYTES, LARGEST_PART_BYTES, MAX_PARTS) == (5_242_880, 5_368_709_120, 10_000)


@given(st.integers(0, 100_000), st.integers(1, 5_000))
@example(size_bytes=0, part_bytes=5)
@example(size_bytes=10, part_bytes=5)
def test_part_ranges_cover_the_file_exactly_and_in_order(size_bytes: int, part_bytes: int) -> None:
    ranges = part_ranges(size_bytes, part_bytes=part_bytes)
    reached = 0
    for offset, length in ranges:
        assert offset == reached
        reached += length
    assert reached == size_bytes
    assert {length for _, length in ranges[:-1]} <= {part_bytes}
    assert 0 < ranges[-1][1] <= part_bytes or ranges == [(0, 0)]


first_parts = st.integers(5 * MIB, LARGEST_PART_BYTES) | st.sampled_from([5 * MIB, 16 * MIB, 64 * MIB, LARGEST_PART_BYTES])
limits = st.integers(1, 60) | st.just(MAX_PARTS)


@given(st.data(), first_parts, limits)
def test_the_parts_of_an_upload_cover_the_file_exactly_and_are_all_valid(
    data: st.DataObject, first: int, max_parts: int
) -> None:
    most = most_bytes(part_bytes=first, max_parts=max_parts)
    size_bytes = data.draw(st.integers(0, most) | st.sampled_from([1, most, most - 1]))
    ranges = upload_ranges(size_bytes, part_bytes=first, max_parts=max_parts)
    assert [offset for offset, _ in ranges] == [0, *accumulate(length for _, length in ranges[:-1])]
    assert sum(length for _, length in ranges) == size_bytes
    assert len(ranges) <= max_parts
    assert all(first <= length <= LARGEST_PART_BYTES for _, length in ranges[:-1]), "a store wants no small part but the last"
    assert ranges[-1][1] > 0 or ranges == [(0, 0)]
    assert {length for _, length in ranges[: equal_parts(max_parts)][:-1]} <= {first}


@given(st.data(), first_parts, limits)
def test_where_a_part_lies_does_not_depend_on_how_large_the_file_becomes(
    data: st.DataObject, first: int, max_parts: int
) -> None:
    sizes_then = st.integers(0, most_bytes(part_bytes=first, max_parts=max_parts))
    one, other = sorted([data.draw(sizes_then), data.draw(sizes_then)])
    beginning = upload_ranges(one, part_bytes=first, max_parts=max_parts, whole_only=True)
    whole = upload_ranges(other, part_bytes=first, max_parts=max_parts)
    assert whole[: len(beginning)] == beginning
    assert not beginning or sum(beginning[-1]) <= one
    sent = upload_ranges(one, part_bytes=first, max_parts=max_parts)
    assert sent[: len(beginning)] == beginning
    assert len(sent) - len(beginning) <= 1


@given(first_parts, limits, st.integers(1, 1 << 60))
def test_what_has_no_room_is_refused_and_of_a_growing_file_all_parts_are_taken(first: int, max_parts: int, more: int) -> None:
    size_bytes = most_bytes(part_bytes=first, max_parts=max_parts) + more
    with pytest.raises(ValueError, match="more than"):
        upload_ranges(size_bytes, part_bytes=first, max_parts=max_parts)
    assert len(upload_ranges(size_bytes, part_bytes=first, max_parts=max_parts, whole_only=True)) == max_parts


@given(st.integers(5 * MIB, LARGEST_PART_BYTES))
def test_a_file_that_grows_to_5_tebibytes_has_room_whatever_it_began_with(first: int) -> None:
    assert most_bytes(part_bytes=first, max_parts=MAX_PARTS) >= 8 * TIB


known = st.integers(0, largest_file_bytes(MAX_PARTS)) | st.just(largest_file_bytes(MAX_PARTS))


@given(known, st.integers(1, LARGEST_PART_BYTES), st.integers(1, 5 * MIB))
def test_a_file_of_known_size_has_room_in_parts_of_one_size_as_long_as_those_can_be(
    size_bytes: int, wanted: int, least: int
) -> None:
    first = part_size(size_bytes, wanted_bytes=wanted, min_part_bytes=least, max_parts=MAX_PARTS)
    assert max(wanted, least) <= first <= LARGEST_PART_BYTES
    ranges = upload_ranges(size_bytes, part_bytes=first, max_parts=MAX_PARTS)
    assert {length for _, length in ranges[:-1]} <= {first}


@given(known, st.integers(1, 64 * MIB), st.integers(1, 5 * MIB))
def test_a_part_grows_beyond_what_is_wanted_only_as_far_as_needed(size_bytes: int, wanted: int, least: int) -> None:
    part_bytes = part_size(size_bytes, wanted_bytes=wanted, min_part_bytes=least, max_parts=MAX_PARTS)
    if part_bytes > max(wanted, least):
        assert part_bytes % MIB == 0
        assert -(-size_bytes // max(wanted, least)) > equal_parts(MAX_PARTS)
        assert -(-size_bytes // (part_bytes - MIB)) > equal_parts(MAX_PARTS) if part_bytes > MIB else True


@given(sizes, sizes)
def test_a_larger_file_never_has_smaller_parts(one: int, other: int) -> None:
    def size(size_bytes: int) -> int:
        return part_size(size_bytes, wanted_bytes=DEFAULT_PART_BYTES, min_part_bytes=5 * MIB, max_parts=MAX_PARTS)

    assert size(min(one, other)) <= size(max(one, other))


def test_a_file_of_80_gigabytes_has_parts_of_16_mebibytes_and_one_of_5_tebibytes_of_1049() -> None:
    def mebibytes(size_bytes: int) -> float:
        return part_size(size_bytes, wanted_bytes=16 * MIB, min_part_bytes=5 * MIB, max_parts=MAX_PARTS) / MIB

    assert mebibytes(80 * 10**9) == 16
    assert mebibytes(MAX_PARTS * 8 * MIB) == 16
    assert mebibytes(MAX_PARTS * 8 * MIB + 1) == 17
    assert mebibytes(5 * TIB) == 1049


def test_an_empty_file_has_one_empty_part() -> None:
    assert part_ranges(0, part_bytes=MIB) == [(0, 0)]
    assert upload_ranges(0, part_bytes=MIB, max_parts=MAX_PARTS) == [(0, 0)]
    assert upload_ranges(0, part_bytes=MIB, max_parts=MAX_PARTS, whole_only=True) == []


def test_a_file_of_exactly_two_parts_has_no_third() -> None:
    assert part_ranges(10, part_bytes=5) == [(0, 5), (5, 5)]
    assert part_ranges(11, part_bytes=5) == [(0, 5), (5, 5), (10, 1)]


rates = st.none() | st.floats(1e3, 1e11)


@given(size_bytes=sizes, is_near=st.booleans(), bytes_per_s=rates)
def test_parts_are_larger_than_usual_only_where_nothing_waits_long_for_them(
    size_bytes: int, is_near: bool, bytes_per_s: float | None
) -> None:
    part_bytes = usual_part_bytes(size_bytes, is_near=is_near, bytes_per_s=bytes_per_s)
    assert DEFAULT_PART_BYTES <= part_bytes <= NEAR_PART_BYTES
    if part_bytes > DEFAULT_PART_BYTES:
        assert is_near
        assert part_bytes * ENOUGH_PARTS <= size_bytes
        assert bytes_per_s is None or part_bytes <= bytes_per_s * LONGEST_S
        assert part_bytes % MIB == 0


def test_a_large_file_goes_to_a_near_store_in_large_parts() -> None:
    near = {size: usual_part_bytes(size * MIB, is_near=True, bytes_per_s=None) // MIB for size in (100, 256, 1024, 10_000)}
    assert near == {100: 16, 256: 32, 1024: 64, 10_000: 64}
    assert usual_part_bytes(1024 * MIB, is_near=True, bytes_per_s=100 * MIB) == 25 * MIB
    assert usual_part_bytes(1024 * MIB, is_near=False, bytes_per_s=1e10) == DEFAULT_PART_BYTES


@given(sizes)
def test_a_file_is_fetched_in_usual_ranges_or_in_enough_larger_ones(size_bytes: int) -> None:
    length = range_bytes(size_bytes)
    assert length == DEFAULT_PART_BYTES or length * ENOUGH_PARTS <= size_bytes
    assert DEFAULT_PART_BYTES <= length <= 2 * DEFAULT_PART_BYTES


def test_a_large_file_is_fetched_in_eight_ranges_or_more() -> None:
    assert {size: range_bytes(size * MIB) // MIB for size in (100, 160, 207, 256, 1024)} == {
        100: 16,
        160: 20,
        207: 25,
        256: 32,
        1024: 32,
    }


def test_parts_after_the_first_half_double_in_size() -> None:
    def lengths(max_parts: int) -> list[int]:
        most = most_bytes(part_bytes=5 * MIB, max_parts=max_parts)
        return [length // MIB for _, length in upload_ranges(most, part_bytes=5 * MIB, max_parts=max_parts)]

    assert [lengths(count) for count in (1, 2, 3)] == [[5], [5, 10], [5, 10, 20]]
    assert lengths(10) == [*[5] * 5, 10, 20, 40, 80, 160]
    assert lengths(100)[49:63] == [5, *[10] * 4, *[20] * 4, *[40] * 4, 80]
    assert lengths(100)[-16:] == [*[2560] * 2, *[5120] * 14]
    assert [equal_parts(count) for count in (1, 2, 3, 10)] == [1, 1, 1, 5]


def test_of_a_growing_file_whole_parts_of_any_size_are_taken() -> None:
    def count(size_bytes: int) -> int:
        return len(upload_ranges(size_bytes, part_bytes=5 * MIB, max_parts=10, whole_only=True))

    ends = [5, 25, 35, 55, 95]
    assert [count(end * MIB) for end in ends] == [1, 5, 6, 7, 8]
    assert [count(end * MIB - 1) for end in ends] == [0, 4, 5, 6, 7]


@pytest.mark.parametrize(("number", "limit"), [(1000, 10_000), (1001, 1000), (10_000, 9999), (10_001, 10_000)])
def test_only_a_part_between_what_every_store_takes_and_the_limit_lowers_it(number: int, limit: int) -> None:
    assert max_parts_after_refusal(number, max_parts=10_000) == limit


@given(number=st.integers(1, 20_000), max_parts=st.integers(1, 10_000))
def test_a_refused_part_lowers_the_limit_below_its_number_and_never_below_what_every_store_takes(
    number: int, max_parts: int
) -> None:
    limit = max_parts_after_refusal(number, max_parts=max_parts)
    assert min(LEAST_PARTS, max_parts) <= limit <= max_parts
    assert limit == max_parts or limit < number
