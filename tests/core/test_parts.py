from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from sidecar.core.parts import (
    DEFAULT_PART_BYTES,
    ENOUGH_PARTS,
    LONGEST_S,
    MIB,
    NEAR_PART_BYTES,
    part_ranges,
    part_size,
    range_bytes,
    usual_part_bytes,
)

TIB = 1 << 40
MAX_PARTS = 10_000

sizes = st.integers(0, 50 * TIB)


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
    # A store wants all parts but the last of one size.
    assert {length for _, length in ranges[:-1]} <= {part_bytes}
    assert 0 < ranges[-1][1] <= part_bytes or ranges == [(0, 0)]


@given(sizes, st.integers(5 * MIB, 5 << 30), st.integers(1, 5 * MIB))
def test_a_part_size_keeps_every_file_within_the_stores_number_of_parts(size_bytes: int, wanted: int, least: int) -> None:
    part_bytes = part_size(size_bytes, wanted_bytes=wanted, min_part_bytes=least, max_parts=MAX_PARTS)
    assert -(-size_bytes // part_bytes) <= MAX_PARTS
    assert part_bytes >= max(wanted, least)


@given(sizes, st.integers(1, 64 * MIB), st.integers(1, 5 * MIB))
def test_a_part_grows_beyond_what_is_wanted_only_as_far_as_needed(size_bytes: int, wanted: int, least: int) -> None:
    part_bytes = part_size(size_bytes, wanted_bytes=wanted, min_part_bytes=least, max_parts=MAX_PARTS)
    if part_bytes > max(wanted, least):
        assert part_bytes % MIB == 0
        assert -(-size_bytes // max(wanted, least)) > MAX_PARTS
        assert -(-size_bytes // (part_bytes - MIB)) > MAX_PARTS if part_bytes > MIB else True


@given(sizes, sizes)
def test_a_larger_file_never_has_smaller_parts(one: int, other: int) -> None:
    def size(size_bytes: int) -> int:
        return part_size(size_bytes, wanted_bytes=DEFAULT_PART_BYTES, min_part_bytes=5 * MIB, max_parts=MAX_PARTS)

    assert size(min(one, other)) <= size(max(one, other))


def test_a_file_of_160_gigabytes_has_parts_of_16_mebibytes_and_one_of_5_tebibytes_of_525() -> None:
    def mebibytes(size_bytes: int) -> float:
        return part_size(size_bytes, wanted_bytes=16 * MIB, min_part_bytes=5 * MIB, max_parts=MAX_PARTS) / MIB

    assert mebibytes(160 * 10**9) == 16
    assert mebibytes(MAX_PARTS * 16 * MIB) == 16
    assert mebibytes(MAX_PARTS * 16 * MIB + 1) == 17
    assert mebibytes(5 * TIB) == 525


def test_an_empty_file_has_one_empty_part() -> None:
    assert part_ranges(0, part_bytes=MIB) == [(0, 0)]


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
