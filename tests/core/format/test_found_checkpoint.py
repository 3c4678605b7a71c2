from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.format.found_checkpoint import (
    CLOCK_TICK_NS,
    Finished,
    FoundCheckpoint,
    FoundFile,
    FoundMarker,
    Identity,
    is_growing,
    is_whole,
    judge,
    may_lack_files,
)
from tests import strategies
from tests.outcome import outcome
from trainer_hook.contract import META_PARTIAL, ContractError, Marker, Node, SaveIdentity, encode_marker, epoch_seconds, rfc3339

HERE = Identity(Node(0, 1), "pod-uid")
FILES = (FoundFile("a.pt", 10, 1, 100), FoundFile("sub/b.pt", 20, 1, 101))


def found(
    marker: bytes | dict[str, Any] = b"",
    *,
    name: str = "checkpoint-20",
    files: tuple[FoundFile, ...] = FILES,
    irregular: tuple[tuple[str, str], ...] = (),
    mtime_ns: int = 1_000_500_000_000,
) -> FoundCheckpoint:
    content = marker if isinstance(marker, bytes) else json.dumps(marker).encode()
    return FoundCheckpoint(name, files, irregular, FoundMarker(content, "version", mtime_ns))


def refusal(checkpoint: FoundCheckpoint, identity: Identity = HERE) -> str:
    with pytest.raises(ContractError) as refused:
        judge(checkpoint, identity)
    return str(refused.value)


found_files = st.lists(
    st.builds(FoundFile, strategies.paths, st.integers(0, 2**50), st.integers(0, 10**12), st.integers(0, 2**62)),
    max_size=5,
    unique_by=lambda file: file.path,
).map(tuple)


@given(strategies.names, strategies.hostile(strategies.markers().map(encode_marker)), found_files)
def test_any_marker_makes_a_finished_checkpoint_or_a_refusal(name: str, raw: bytes, files: tuple[FoundFile, ...]) -> None:
    judged = outcome(judge, found(raw, name=name, files=files), HERE)
    if isinstance(judged, Finished):
        assert set(judged.files) <= set(files)
        assert judged.size_bytes == sum(file.size_bytes for file in judged.files)
        assert judged.step is not None or name == "final"


@given(strategies.markers(step=st.none()), found_files, st.data())
def test_what_the_marker_lists_is_taken_and_nothing_else(
    marker: Marker, files: tuple[FoundFile, ...], data: st.DataObject
) -> None:
    listed = data.draw(st.lists(st.sampled_from(files), unique=True)) if files else []
    said = [{"path": file.path, "size_bytes": file.size_bytes} for file in listed]
    judged = judge(found({"files": said, "attempt": "a1"}, files=files), Identity(Node(1, 4), "pod-uid"))
    assert list(judged.files) == listed


@given(found_files.filter(bool), st.data())
def test_a_listed_file_of_another_size_or_gone_is_refused_by_name(files: tuple[FoundFile, ...], data: st.DataObject) -> None:
    victim = data.draw(st.sampled_from(files))
    change = data.draw(st.integers(-5, 5).filter(lambda by: by != 0 and victim.size_bytes + by >= 0))
    said = [{"path": f.path, "size_bytes": f.size_bytes + (change if f is victim else 0)} for f in files]
    assert repr(victim.path) in refusal(found({"files": said}, files=files))
    exact = [{"path": f.path, "size_bytes": f.size_bytes} for f in files]
    gone = tuple(file for file in files if file is not victim)
    assert repr(victim.path) in refusal(found({"files": exact}, files=gone))


def test_an_empty_marker_is_filled_in_from_name_environment_and_directory() -> None:
    judged = judge(found(b""), HERE)
    assert judged == Finished(
        name="checkpoint-20",
        version="version",
        step=20,
        reason=None,
        attempt="pod-uid",
        node=Node(0, 1),
        created_at_s=1000.5,
        world_size=None,
        files=FILES,
        meta={},
        marked_at_s=1000.5,
        names_attempt=False,
    )
    assert judged.size_bytes == 30
    assert judged.restored_from is None


def test_the_marker_wins_over_the_environment() -> None:
    said = {
        "attempt": "a1",
        "node": {"index": 0, "count": 2},
        "created_at": "2026-03-01T12:00:00Z",
        "world_size": 16,
        "global_step_seconds": 1.5,
        "meta": {"restored": "0123456789abcdef"},
    }
    judged = judge(found(said), HERE)
    assert (judged.attempt, judged.node, judged.world_size, judged.step_seconds) == ("a1", Node(0, 2), 16, 1.5)
    assert judged.created_at_s == epoch_seconds("2026-03-01T12:00:00Z")
    assert judged.restored_from == "0123456789abcdef"


def test_one_of_several_that_nobody_says_which_is_refused_unless_its_marker_does() -> None:
    unknown = Identity(None, "pod-uid")
    assert "CKPT_NODE_COUNT" in refusal(found(b""), unknown)
    assert judge(found({"node": {"index": 3, "count": 4}, "attempt": "a1"}), unknown).node == Node(3, 4)


def test_a_marker_that_names_no_node_is_of_the_node_that_wrote_it_also_in_a_job_of_another_number_of_nodes() -> None:
    """A part of a step counted as all of it."""
    version = found(b"").marker.version
    alone = Identity(Node(), "pod-uid", nodes={version: Node(0, 3)})
    assert judge(found({"attempt": "a1"}), alone).node == Node(0, 3)
    assert "has no attempt" in refusal(found(b""), alone)
    assert judge(found({"attempt": "a1", "node": {"index": 1, "count": 2}}), alone).node == Node(1, 2)
    assert judge(found({"attempt": "a1", "meta": {"restored": "0123456789abcdef"}}), alone).node == Node(), "no part of it"
    assert "CKPT_NODE_COUNT" in refusal(found({"attempt": "a1"}), Identity(Node(), "pod-uid", nodes={version: None}))


@given(strategies.nodes())
def test_only_a_lone_node_may_leave_out_the_attempt(node: Node) -> None:
    identity = Identity(node, "pod-uid")
    if node.count == 1:
        assert judge(found(b""), identity).attempt == "pod-uid"
    else:
        assert 'the same "attempt"' in refusal(found(b""), identity)
    assert judge(found({"attempt": "a1"}), identity).attempt == "a1"


def test_two_nodes_need_an_attempt_and_one_of_them_may_have_no_files() -> None:
    of_two = Identity(Node(1, 2), "pod-uid")
    assert refusal(found(b""), of_two) == (
        "it is one of 2 nodes' and its marker has no attempt: "
        'put the same "attempt" into the marker of every node, a new one for each start of the job'
    )
    assert judge(found({"attempt": "a1"}, files=()), of_two).files == ()
    assert refusal(found(b"", files=())) == "it holds no files: write them before the marker"


def test_a_file_written_after_the_marker_is_named_and_one_of_the_same_instant_is_not() -> None:
    assert refusal(found(mtime_ns=0)) == "'a.pt' was written after the marker: write the marker again"
    assert judge(found(mtime_ns=1), HERE).files == FILES


def test_a_file_that_the_marker_does_not_list_may_be_written_later() -> None:
    files = (*FILES, FoundFile("events.log", 1, 2_000_000_000_000, 102))
    listed = [{"path": file.path, "size_bytes": file.size_bytes} for file in FILES]
    assert judge(found({"files": listed}, files=files), HERE).files == FILES
    assert "'events.log'" in refusal(found(files=files))


@given(st.integers(-(2**90), 2**90))
def test_a_time_that_cannot_be_written_down_refuses_the_checkpoint(mtime_ns: int) -> None:
    judged = outcome(judge, found(files=(FoundFile("a.pt", 1, -(2**91), 1),), mtime_ns=mtime_ns), HERE)
    if isinstance(judged, Finished):
        rfc3339(judged.created_at_s)
    else:
        assert "calendar" in str(judged)


def test_files_that_the_marker_does_not_list_are_left_out() -> None:
    assert [f.path for f in judge(found({"files": [{"path": "a.pt", "size_bytes": 10}]}), HERE).files] == ["a.pt"]


@pytest.mark.parametrize("kind", ["symbolic link", "socket", "device", "fifo"])
def test_what_is_neither_file_nor_directory_is_refused_with_its_kind(kind: str) -> None:
    said = refusal(found(irregular=(("model.pt", kind),)))
    assert "model.pt" in said
    assert kind in said


def test_a_file_with_a_name_that_no_key_can_have_is_refused() -> None:
    assert "UTF-8" in refusal(found(files=(FoundFile("a\udcff.pt", 1, 1, 1),)))


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"step": 30}', b'{"format": 2}'])
def test_a_marker_that_is_not_valid_refuses_the_checkpoint(content: bytes) -> None:
    assert refusal(found(content))


@pytest.mark.parametrize(
    ("name", "marker", "urgent"),
    [
        ("checkpoint-20", {"reason": "jit"}, True),
        ("checkpoint-20", {"reason": "final"}, True),
        ("final", {}, True),
        ("final", {"reason": "manual"}, True),
        ("checkpoint-20", {"reason": "periodic"}, False),
        ("checkpoint-20", {"reason": "manual"}, False),
        ("checkpoint-20", {}, False),
    ],
)
def test_jit_and_final_are_urgent(name: str, marker: dict[str, Any], urgent: bool) -> None:
    assert judge(found(marker, name=name), HERE).urgent is urgent


def test_final_without_reason_is_final_and_has_the_step_of_its_marker_or_none() -> None:
    assert judge(found(b"", name="final"), HERE).reason == "final"
    assert judge(found(b"", name="final"), HERE).step is None
    assert judge(found({"step": 99}, name="final"), HERE).step == 99


def test_a_restored_note_that_is_no_text_is_no_note() -> None:
    assert judge(found({"meta": {"restored": 7}}), HERE).restored_from is None


def test_a_stamp_changes_with_each_write_and_that_of_a_growing_file_does_not() -> None:
    before, after = FoundFile("model", 1, 10, 7), FoundFile("model", 2, 11, 7)
    assert before.stamp != after.stamp
    assert before.growing_stamp == after.growing_stamp
    assert is_growing(before.growing_stamp)
    assert not is_growing(before.stamp)


@given(st.sampled_from(["final", "checkpoint-20"]), st.booleans())
def test_the_fields_of_a_finished_checkpoint(name: str, partial: bool) -> None:
    checkpoint = Finished(name, "v", 20, None, "a", Node(), 1.8e9, None, (), {META_PARTIAL: 2} if partial else {})
    assert checkpoint.resume_step == (None if name == "final" else 20)
    assert checkpoint.is_partial is partial
    assert checkpoint.restored_from is None


@pytest.mark.parametrize(
    ("marker", "expected"), [(b"", False), (b'{"step": 1', False), (b'{"step": 1}', True), (b"{}\n", True)]
)
def test_a_marker_that_ends_early_is_not_whole(marker: bytes, expected: bool) -> None:
    assert is_whole(marker) is expected


@pytest.mark.parametrize(
    ("marker", "lists"),
    [(b"", False), (b"{}", False), ({"format": 1, "step": 20}, False), ({"format": 1, "files": []}, True), (b"no JSON", True)],
)
def test_only_a_marker_that_lists_no_files_leaves_open_whether_some_were_deleted(
    marker: bytes | dict[str, Any], lists: bool
) -> None:
    def changed_after_ns(nanoseconds: int) -> FoundCheckpoint:
        checkpoint = found(marker)
        marked = dataclasses.replace(checkpoint.marker, mtime_ns=10**18, changed_ns=10**18)
        return dataclasses.replace(checkpoint, marker=marked, entries_changed_ns=10**18 + nanoseconds)

    assert not may_lack_files(changed_after_ns(0))
    assert not may_lack_files(changed_after_ns(CLOCK_TICK_NS))
    assert may_lack_files(changed_after_ns(CLOCK_TICK_NS + 1)) is not lists
    assert changed_after_ns(0) == changed_after_ns(1), "a look at it changes nothing"
    written = (FoundFile("new.pt", 1, 10**18 + 1, 7),)
    being_saved = dataclasses.replace(changed_after_ns(CLOCK_TICK_NS + 1), files=written)
    assert not may_lack_files(being_saved), "a rotation writes nothing"


@pytest.mark.parametrize("marker", [b"", b"{}"])
def test_more_files_may_follow_a_marker_that_was_copied_with_its_time(marker: bytes) -> None:
    def copied_after_ns(nanoseconds: int) -> FoundCheckpoint:
        checkpoint = found(marker)
        now_ns = checkpoint.marker.mtime_ns + nanoseconds
        marked = dataclasses.replace(checkpoint.marker, changed_ns=now_ns)
        return dataclasses.replace(checkpoint, marker=marked, entries_changed_ns=now_ns)

    assert may_lack_files(copied_after_ns(60 * 10**9))
    assert not may_lack_files(copied_after_ns(10**9)), "a marker that was written to the disk before it got its name"


def test_a_checkpoint_names_the_writing_of_its_step_as_its_commit_will() -> None:
    checkpoint = judge(found({"attempt": "a1", "created_at": "2026-03-01T12:00:00.000Z"}), HERE)
    assert checkpoint.identity == SaveIdentity("a1", None, "2026-03-01T12:00:00.000Z", is_committed=True)
