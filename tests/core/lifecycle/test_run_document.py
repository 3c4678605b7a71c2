from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.lifecycle.fencing import MOST_EPOCH
from sidecar.core.lifecycle.prefix_ownership import Run
from sidecar.core.lifecycle.run_document import decode_run, encode_run
from tests.strategies import ids
from trainer_hook.contract import ContractError

text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
seconds = st.none() | st.floats(0, 1e9)
runs = st.builds(
    Run,
    run_id=text,
    job=st.none() | text,
    holder=st.none() | text,
    beat=st.integers(0, 2**62),
    ending=st.booleans(),
    attempts=st.lists(ids, max_size=4).map(tuple),
    epoch=st.integers(0, MOST_EPOCH),
    ends_in_s=seconds,
    beat_s=seconds,
)


@given(runs)
def test_a_run_that_is_written_reads_as_itself(run: Run) -> None:
    assert decode_run(encode_run(run)) == run


def test_an_epoch_that_no_prefix_reaches_counts_as_none() -> None:
    assert decode_run(encode_run(Run("r1", epoch=MOST_EPOCH))).epoch == MOST_EPOCH
    assert decode_run(encode_run(Run("r1", epoch=MOST_EPOCH + 1))).epoch == 0


def test_fields_with_their_default_value_are_not_written() -> None:
    assert json.loads(encode_run(Run("r1"))) == {"format": 1, "run_id": "r1"}
    assert json.loads(encode_run(Run("r1", ends_in_s=0.0, epoch=3))) == {
        "format": 1,
        "run_id": "r1",
        "epoch": 3,
        "ends_in_s": 0.0,
    }


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "run_id"),
        ({"run_id": 3}, "run_id"),
        ({"run_id": ""}, "run_id"),
        ({"run_id": "r", "format": 2}, "format"),
        ({"run_id": "r", "job": ["j"]}, "job"),
        ({"run_id": "r", "holder": {}}, "holder"),
        ({"run_id": "r", "beat": -1}, "beat"),
        ({"run_id": "r", "beat": 10**400}, "beat"),
        ({"run_id": "r", "epoch": 1.5}, "epoch"),
        ({"run_id": "r", "ending": "yes"}, "ending"),
        ({"run_id": "r", "attempts": "a1"}, "attempts"),
        ({"run_id": "r", "attempts": ["a1", 2]}, "attempts"),
        ({"run_id": "r", "ends_in_s": float("nan")}, "ends_in_s"),
        ({"run_id": "r", "beat_s": 10**400}, "beat_s"),
        ({"run_id": "r\ud800"}, "surrogates"),
    ],
)
def test_a_field_of_another_type_is_named(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ContractError, match=why):
        decode_run(json.dumps(fields).encode())


def test_a_key_that_is_there_twice_is_named() -> None:
    with pytest.raises(ContractError, match=r"run\.json has the key 'run_id' twice in one object"):
        decode_run(b'{"run_id": "ours", "run_id": "theirs"}')
