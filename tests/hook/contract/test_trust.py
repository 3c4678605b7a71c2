"""When neither container believes a finished checkpoint, and when two nodes have the same one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_hook.contract import (
    META_RESTORED,
    META_RESTORED_BOOT,
    Marker,
    SaveIdentity,
    identity_of,
    may_be_same_save,
    parse_identity,
    was_downloaded_in,
    written_after,
)

TIME, LATER = "2026-03-01T12:00:00.250Z", "2026-03-01T12:00:07.000Z"
few = st.sampled_from([None, "a", "b"])
identities = st.builds(SaveIdentity, few, few, st.sampled_from([None, TIME, LATER]), st.booleans())


@given(st.lists(st.integers(0, 2**62), max_size=5), st.integers(0, 2**62))
def test_what_was_written_after_its_marker_is_not_what_was_finished(file_times_ns: list[int], marked_ns: int) -> None:
    times_ns = {f"{index}.pt": time_ns for index, time_ns in enumerate(file_times_ns)}
    later = written_after(times_ns.items(), marked_ns)
    if later is None:
        assert all(time_ns <= marked_ns for time_ns in file_times_ns)
    else:
        assert times_ns[later] > marked_ns


def test_a_download_is_known_by_the_run_of_the_kernel_that_made_it() -> None:
    meta = {META_RESTORED: "0" * 16, META_RESTORED_BOOT: "one"}
    assert was_downloaded_in(meta, "one")
    assert not was_downloaded_in(meta, "another")
    assert not was_downloaded_in(meta | {META_RESTORED_BOOT: ""}, ""), "unknown"
    assert not was_downloaded_in({META_RESTORED_BOOT: "one"}, "one"), "not downloaded"


@given(identities, identities)
def test_it_does_not_matter_which_node_compares(one: SaveIdentity, other: SaveIdentity) -> None:
    assert may_be_same_save(one, one)
    assert may_be_same_save(one, other) == may_be_same_save(other, one)
    if None not in (one.attempt, other.attempt) and one.attempt != other.attempt:
        assert not may_be_same_save(one, other)


PART = Marker(attempt="a", save_id="1", created_at=TIME)
DOWNLOAD = Marker(attempt="a", created_at=TIME, meta={META_RESTORED: "1f"})


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (PART, replace(PART, created_at=LATER), True),
        (PART, replace(PART, attempt="b"), False),
        (PART, replace(PART, save_id="2"), False),
        (PART, DOWNLOAD, True),
        (PART, replace(DOWNLOAD, attempt="b"), False),
        (DOWNLOAD, replace(DOWNLOAD, meta={META_RESTORED: "2f"}), True),  # a commit that was gone is written again
        (DOWNLOAD, replace(DOWNLOAD, created_at=LATER), False),
        (DOWNLOAD, replace(DOWNLOAD, created_at=None), True),
    ],
)
def test_nodes_have_the_same_save_if_attempt_save_and_time_do_not_differ(one: Marker, other: Marker, is_same: bool) -> None:
    assert may_be_same_save(identity_of(one, marked_s=1.0), identity_of(other, marked_s=2.0)) is is_same


@pytest.mark.parametrize(
    ("marked_s", "is_same"), [(1772366400.2509, True), (1772366401.25, False), (1e300, False), (None, False)]
)
def test_the_time_tells_where_a_marker_has_no_attempt(marked_s: float | None, is_same: bool) -> None:
    """The sidecar gave the empty marker the attempt of its pod, and the time of its file."""
    assert may_be_same_save(identity_of(Marker(), marked_s=marked_s), identity_of(DOWNLOAD, marked_s=9.0)) is is_same


ANSWER = {"attempt": "a", "save_id": "1", "finished_at": "2026-03-01T13:00:00.250+01:00"}


@pytest.mark.parametrize(
    ("answer", "identity"),
    [
        (ANSWER, SaveIdentity("a", "1", TIME, is_committed=True)),
        (ANSWER | {"save_id": None}, SaveIdentity("a", None, TIME, is_committed=True)),
        (None, None),
        ([ANSWER], None),
        (ANSWER | {"attempt": 1}, None),
        (ANSWER | {"finished_at": "yesterday"}, None),
    ],
)
def test_the_sidecar_tells_which_save_it_has_compared_with_the_store(answer: Any, identity: SaveIdentity | None) -> None:
    assert parse_identity(answer) == identity
