from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.lifecycle.volume_space import LEAST_CHECKPOINTS, LEAST_FREE_BYTES, is_nearly_full

sizes = st.integers(0, 10**15)


@given(sizes, sizes, sizes)
def test_room_for_two_checkpoints_is_enough_on_a_volume_of_any_size(free: int, total: int, checkpoint: int) -> None:
    assert is_nearly_full(free, total, checkpoint_bytes=checkpoint) == (free < LEAST_CHECKPOINTS * checkpoint)


@given(sizes, sizes)
def test_without_a_checkpoint_a_gigabyte_is_enough(free: int, total: int) -> None:
    if is_nearly_full(free, total, checkpoint_bytes=None):
        assert free < LEAST_FREE_BYTES
        assert free < total


@given(st.integers(0, 10**9))
def test_an_empty_volume_is_not_nearly_full_however_small_it_is(total: int) -> None:
    assert not is_nearly_full(total, total, checkpoint_bytes=None)
