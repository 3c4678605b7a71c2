from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.planning.storage import (
    DTYPE_BYTES,
    OPTIMIZER_BYTES,
    STRATEGIES,
    guide_storage,
    measured_storage,
    parameter_count,
    state_storage,
)

GB, BILLION = 10**9, 10**9
counts = st.integers(1, 10**13)


@pytest.mark.parametrize(("billions", "strategy", "storage_gb"), [(8, "ddp", 275), (7, "fsdp", 200), (70, "zero3-lora", 168)])
def test_the_guides_examples_come_out_exactly(billions: int, strategy: str, storage_gb: int) -> None:
    assert guide_storage(billions * BILLION, strategy=strategy).storage_bytes == storage_gb * GB


def test_a_checkpoint_holds_weights_master_weights_and_optimizer_state() -> None:
    assert state_storage(8 * BILLION, optimizer="adamw").checkpoint_bytes == 80 * GB
    assert state_storage(8 * BILLION, optimizer="adamw", master=True).checkpoint_bytes == 112 * GB
    assert state_storage(8 * BILLION, optimizer="none", dtype="fp32").checkpoint_bytes == 32 * GB


def test_kept_checkpoints_the_one_being_written_and_a_fifth_of_headroom() -> None:
    needed = measured_storage(10 * GB, keep=4)
    assert (needed.copies, needed.storage_bytes) == (5, 60 * GB)


@given(counts, st.sampled_from(sorted(STRATEGIES)), st.sampled_from(sorted(DTYPE_BYTES)), st.integers(1, 100))
def test_more_parameters_or_kept_checkpoints_never_need_less(parameters: int, strategy: str, dtype: str, keep: int) -> None:
    needed = guide_storage(parameters, strategy=strategy, dtype=dtype, keep=keep)
    assert needed.storage_bytes >= needed.checkpoint_bytes >= parameters * DTYPE_BYTES[dtype] * STRATEGIES[strategy].multiplier
    assert guide_storage(parameters + 1, strategy=strategy, dtype=dtype, keep=keep).storage_bytes >= needed.storage_bytes
    more = guide_storage(parameters, strategy=strategy, dtype=dtype, keep=keep + 1).storage_bytes
    assert more > needed.storage_bytes if STRATEGIES[strategy].keeps_copies else more == needed.storage_bytes


@given(counts, st.sampled_from(sorted(OPTIMIZER_BYTES)), st.sampled_from(sorted(DTYPE_BYTES)), st.booleans(), st.integers(1, 9))
def test_the_state_is_a_measured_size_like_any_other(
    parameters: int, optimizer: str, dtype: str, master: bool, keep: int
) -> None:
    needed = state_storage(parameters, optimizer=optimizer, dtype=dtype, master=master, keep=keep)
    assert needed == measured_storage(needed.checkpoint_bytes, keep=keep)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8B", 8 * BILLION),
        ("70b", 70 * BILLION),
        ("1.5B", 1_500_000_000),
        (" 350 M", 350_000_000),
        ("124000000", 124_000_000),
        ("1", 1),
        ("1000T", 10**15),
    ],
)
def test_a_parameter_count_has_the_fields_units(text: str, count: int) -> None:
    assert parameter_count(text) == count


@pytest.mark.parametrize("text", ["", "0", "0B", "B", "8GB", "-8B", "8e9", "1e400", "99999T", "8 B B", "nan", "٨B"])
def test_what_is_no_parameter_count_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 350M"):
        parameter_count(text)


@given(st.text())
def test_any_text_is_a_positive_count_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert parameter_count(text) > 0
