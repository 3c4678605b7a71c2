"""A deletion is finished only where nobody has written since it began."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.commit.remainder import is_remainder, last_write
from sidecar.core.format import keys
from trainer_hook.contract import Node

NAME = "checkpoint-20"
OBJECTS = [
    keys.shared_file(NAME, "model"),
    keys.shared_file(NAME, "optimizer"),
    keys.manifest(NAME, "a", Node(0, 2)),
    keys.node_file(NAME, "a", Node(1, 2), "model"),
    keys.all_manifests(NAME, "a"),
]
times = st.integers(1, 99).map("{:03}".format)
checkpoints = st.dictionaries(st.sampled_from(OBJECTS), times, min_size=1)
records = st.dictionaries(st.sampled_from([keys.deletion(NAME), keys.quarantined(NAME, "0" * 16)]), times)


@given(checkpoints, records, st.data())
def test_whatever_a_deletion_leaves_is_its_remainder(there: dict[str, str], later: dict[str, str], data: st.DataObject) -> None:
    before = last_write(there)
    assert before is not None
    left = {key: at for key, at in there.items() if data.draw(st.booleans())}
    assert is_remainder(NAME, left | later, before=before)


@given(checkpoints, records, st.sampled_from(OBJECTS), times)
def test_one_object_that_was_written_since_protects_all(
    there: dict[str, str], later: dict[str, str], key: str, after: str
) -> None:
    before = last_write(there)
    assert before is not None
    assert not is_remainder(NAME, there | later | {key: before + after}, before=before)


@given(checkpoints, st.sampled_from(OBJECTS))
def test_an_object_of_unknown_time_may_have_been_written_since(there: dict[str, str], key: str) -> None:
    before = last_write(there)
    assert before is not None
    assert last_write(there | {key: ""}) is None
    assert not is_remainder(NAME, there | {key: ""}, before=before)


@given(checkpoints, times)
def test_a_committed_checkpoint_is_no_remainder(there: dict[str, str], at: str) -> None:
    assert not is_remainder(NAME, there | {keys.commit(NAME): at}, before="999")


def test_without_objects_there_is_no_last_write() -> None:
    assert last_write({}) is None
