from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.commit.commit import commit_of
from sidecar.core.commit.resume import (
    check_listing,
    check_manifest,
    check_node_set,
    check_paths,
    differs_from_its_commit,
    files_for,
    matches_train_call,
    may_replace,
    may_replace_beside_trainer,
    newest_first,
    next_to_try,
    steps_before,
)
from sidecar.core.format import keys
from sidecar.core.format.found_checkpoint import Finished, FoundFile
from sidecar.core.format.manifest import (
    Commit,
    FileEntry,
    Manifest,
    ManifestEntry,
    NodeOf,
    decode_commit,
    decode_manifest,
    encode,
)
from tests import strategies
from trainer_hook.contract import META_RESTORED, ContractError, Node, epoch_seconds, step_of

SAME = Commit(
    name="checkpoint-20",
    step=20,
    attempt="a",
    created_at="2026-03-01T12:00:00.000Z",
    committed_at=None,
    reason=None,
    world_size=None,
    meta={},
    files=2,
    size_bytes=30,
    manifests=(ManifestEntry(key=keys.manifest("checkpoint-20", "a", Node()), size_bytes=1, crc64nvme="0" * 16),),
)
LOCAL = Finished(
    name="checkpoint-20",
    version="v",
    step=20,
    reason=None,
    attempt="a",
    node=Node(),
    created_at_s=epoch_seconds("2026-03-01T12:00:00.000Z"),
    world_size=None,
    files=(FoundFile("model", 10, 1, 1), FoundFile("optimizer", 20, 1, 2)),
    meta={},
)


def test_a_checkpoint_that_lost_a_file_after_it_was_committed_differs_from_its_commit() -> None:
    assert not differs_from_its_commit(LOCAL, SAME)
    assert differs_from_its_commit(replace(LOCAL, files=LOCAL.files[:1]), SAME)
    assert differs_from_its_commit(replace(LOCAL, files=(*LOCAL.files[:1], FoundFile("optimizer", 19, 1, 2))), SAME)


def test_a_checkpoint_that_was_finished_anew_is_not_measured_by_the_commit_before() -> None:
    anew = replace(LOCAL, files=LOCAL.files[:1], created_at_s=LOCAL.created_at_s + 1)
    assert not differs_from_its_commit(anew, SAME)
    assert not differs_from_its_commit(replace(anew, created_at_s=LOCAL.created_at_s, attempt="b"), SAME)


def test_a_marker_without_an_attempt_is_the_same_for_the_next_pod_on_the_volume() -> None:
    next_pod = replace(LOCAL, attempt="b", names_attempt=False)
    assert not differs_from_its_commit(next_pod, SAME)
    assert differs_from_its_commit(replace(next_pod, files=LOCAL.files[:1]), SAME)
    assert may_replace(next_pod, SAME, is_chosen=False)
    anew = replace(next_pod, files=LOCAL.files[:1], created_at_s=LOCAL.created_at_s + 1)
    assert not differs_from_its_commit(anew, SAME)
    assert not may_replace(anew, SAME, is_chosen=True)


@st.composite
def committed(draw: st.DrawFn) -> tuple[Commit, list[Manifest]]:
    name, attempt = draw(strategies.names), draw(strategies.ids)
    count = draw(st.integers(1, 3))
    manifests = [draw(strategies.manifests(name, attempt, Node(index, count))) for index in range(count)]
    raw = {index: encode(manifest) for index, manifest in enumerate(manifests)}
    return commit_of(manifests, raw, committed_at="2026-03-01T12:00:00.000Z"), manifests


def offered(raw_commit: bytes, raw_manifests: dict[str, bytes], sizes: dict[str, int], name: str) -> Commit:
    """All that is verified before a byte of data is fetched, in the order of I5."""
    commit = decode_commit(raw_commit, key=keys.commit(name))
    manifests = []
    for entry in commit.manifests:
        if entry.key not in raw_manifests:
            raise ContractError(f"{entry.key}: missing in the store")
        check_manifest(entry, raw_manifests[entry.key])
        manifests.append(decode_manifest(raw_manifests[entry.key], key=entry.key))
    check_node_set(commit, manifests)
    check_listing(manifests, sizes)
    return commit


def stored(commit: Commit, manifests: Sequence[Manifest]) -> tuple[bytes, dict[str, bytes], dict[str, int]]:
    documents = {entry.key: encode(manifest) for entry, manifest in zip(commit.manifests, manifests, strict=True)}
    sizes = {entry.key: entry.size_bytes for manifest in manifests for entry in manifest.files}
    return encode(commit), documents, sizes


def consistent(pair: tuple[Commit, list[Manifest]]) -> bool:
    """Whether no two nodes record other sizes under one key: such a step is never committed."""
    claims = {(e.key, e.size_bytes) for manifest in pair[1] for e in manifest.files}
    return len({key for key, _ in claims}) == len(claims)


commits = committed().filter(consistent)


@given(commits)
def test_an_undamaged_commit_is_offered(pair: tuple[Commit, list[Manifest]]) -> None:
    commit, manifests = pair
    assert offered(*stored(commit, manifests), commit.name) == commit


@given(commits, st.data())
def test_a_manifest_with_any_byte_changed_is_refused(pair: tuple[Commit, list[Manifest]], data: st.DataObject) -> None:
    commit, manifests = pair
    raw, documents, sizes = stored(commit, manifests)
    key = data.draw(st.sampled_from(sorted(documents)))
    document = bytearray(documents[key])
    document[data.draw(st.integers(0, len(document) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ContractError, match="crc64nvme"):
        offered(raw, documents | {key: bytes(document)}, sizes, commit.name)


@given(commits, st.data())
def test_a_manifest_that_is_cut_longer_or_gone_is_refused(pair: tuple[Commit, list[Manifest]], data: st.DataObject) -> None:
    commit, manifests = pair
    raw, documents, sizes = stored(commit, manifests)
    key = data.draw(st.sampled_from(sorted(documents)))
    content = documents[key]
    for other in (content[: data.draw(st.integers(0, len(content) - 1))], content + b"\n"):
        with pytest.raises(ContractError, match="bytes, the commit says"):
            offered(raw, documents | {key: other}, sizes, commit.name)
    with pytest.raises(ContractError, match="missing"):
        offered(raw, {k: v for k, v in documents.items() if k != key}, sizes, commit.name)


INFORMATIVE = {"committed_at", "files", "size_bytes"}


@given(commits, st.data())
def test_a_commit_with_any_byte_changed_is_refused_or_says_the_same_but_for_its_time_and_totals(
    pair: tuple[Commit, list[Manifest]], data: st.DataObject
) -> None:
    commit, manifests = pair
    raw, documents, sizes = stored(commit, manifests)
    changed = bytearray(raw)
    changed[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ContractError):
        still = offered(bytes(changed), documents, sizes, commit.name)
        assert still.model_dump(exclude=INFORMATIVE) == commit.model_dump(exclude=INFORMATIVE)


@given(commits, st.data())
def test_an_object_of_another_size_or_gone_is_refused_by_its_key(
    pair: tuple[Commit, list[Manifest]], data: st.DataObject
) -> None:
    commit, manifests = pair
    raw, documents, sizes = stored(commit, manifests)
    if not sizes:
        return
    key = data.draw(st.sampled_from(sorted(sizes)))
    other = data.draw(st.integers(0, 2**50).filter(lambda size: size != sizes[key]))
    with pytest.raises(ContractError, match="writer recorded") as refused:
        offered(raw, documents, sizes | {key: other}, commit.name)
    assert key in str(refused.value)
    with pytest.raises(ContractError, match="missing in the store"):
        offered(raw, documents, {k: v for k, v in sizes.items() if k != key}, commit.name)


@given(commits, st.data())
def test_a_commit_of_fewer_or_of_doubled_manifests_is_refused(pair: tuple[Commit, list[Manifest]], data: st.DataObject) -> None:
    commit, manifests = pair
    at = data.draw(st.integers(0, len(manifests) - 1))
    with pytest.raises(ContractError):
        check_node_set(commit, manifests[:at] + manifests[at + 1 :])
    with pytest.raises(ContractError):
        check_node_set(commit, [*manifests, manifests[at]])


def test_the_nodes_whose_manifests_there_are_are_named() -> None:
    manifests = [
        Manifest(name="checkpoint-20", step=20, attempt="a", node=NodeOf(index=index, count=3), files=()) for index in (0, 2)
    ]
    said = r"checkpoint-20: its manifests are of node 0 of 3, 2 of 3, not of one each"
    with pytest.raises(ContractError, match=said):
        check_node_set(SAME, manifests)


def test_a_node_set_of_an_absurd_count_is_refused_at_once() -> None:
    of_many = Manifest.model_construct(name="final", attempt="a", node=NodeOf.model_construct(index=0, count=10**15), files=())
    commit = Commit(name="final", attempt="a", manifests=(ManifestEntry(key="k", size_bytes=0, crc64nvme="0" * 16),))
    with pytest.raises(ContractError, match="not of one each"):
        check_node_set(commit, [of_many])


@pytest.mark.parametrize(
    "changed",
    [{"attempt": "a2"}, {"name": "checkpoint-30"}, {"node": NodeOf(index=1, count=3)}, {"node": NodeOf(index=0, count=2)}],
)
def test_a_manifest_of_another_attempt_checkpoint_or_node_count_is_refused(changed: dict[str, Any]) -> None:
    manifests = [
        Manifest(name="checkpoint-20", step=20, attempt="a1", node=NodeOf(index=index, count=2), files=()) for index in (0, 1)
    ]
    commit = commit_of(manifests, {0: b"", 1: b""}, committed_at="2026-03-01T12:00:00Z")
    check_node_set(commit, manifests)
    with pytest.raises(ContractError, match="checkpoint-20"):
        check_node_set(commit, [manifests[0], manifests[1].model_copy(update=changed)])


@pytest.mark.parametrize(
    "changed",
    [{"step": None}, {"reason": "jit"}, {"created_at": None}, {"world_size": 9}, {"meta": {"train_call": 1}}],
)
def test_a_commit_that_says_something_else_than_its_manifests_is_refused(changed: dict[str, Any]) -> None:
    manifests = [
        Manifest(
            name="checkpoint-20",
            step=20,
            attempt="a1",
            node=NodeOf(index=0, count=1),
            reason="periodic",
            created_at="2026-03-01T12:00:00Z",
            world_size=8,
            files=(),
        )
    ]
    commit = commit_of(manifests, {0: b""}, committed_at="2026-03-01T12:00:00Z")
    with pytest.raises(ContractError, match=next(iter(changed))):
        check_node_set(commit.model_copy(update=changed), manifests)


@given(st.lists(strategies.names | st.sampled_from(["checkpoint-20.tmp", ".ckpt", "run", "checkpoint-007"]), unique=True))
def test_only_steps_are_resumed_and_the_newest_first(folders: list[str]) -> None:
    order = newest_first(folders)
    assert set(order) == {name for name in folders if step_of(name) is not None}
    steps = [step for name in order if (step := step_of(name)) is not None]
    assert steps == sorted(steps, reverse=True)


def test_checkpoint_100_is_newer_than_checkpoint_20_and_final_is_not_resumed_from() -> None:
    assert newest_first(["checkpoint-20", "final", "checkpoint-100", "checkpoint-3"]) == [
        "checkpoint-100",
        "checkpoint-20",
        "checkpoint-3",
    ]
    assert newest_first(["checkpoint-20", "final"], and_final=True) == ["final", "checkpoint-20"]
    assert newest_first(["checkpoint-20"], and_final=True) == ["checkpoint-20"]


@given(commits, st.data())
def test_a_node_gets_every_path_once_and_of_its_own_files_its_own(
    pair: tuple[Commit, list[Manifest]], data: st.DataObject
) -> None:
    _, manifests = pair
    count = manifests[0].node.count
    index = data.draw(st.integers(0, count + 1))  # a job that is larger now than when it was saved
    files = files_for(Node(index, max(count, index + 1)), manifests)
    paths = [entry.path for entry in files]
    assert paths == sorted({entry.path for manifest in manifests for entry in manifest.files})
    for entry in files:
        claims: list[tuple[int, FileEntry]] = [(m.node.index, e) for m in manifests for e in m.files if e.path == entry.path]
        own = [e for owner, e in claims if owner == index]
        assert entry == (own[0] if own else min(claims, key=lambda claim: claim[0])[1])


@pytest.mark.parametrize(
    ("meta", "train_call", "matches"),
    [
        ({}, None, True),
        ({"train_call": 3}, None, True),
        ({}, 0, True),
        ({"train_call": 0}, 0, True),
        ({"train_call": 1}, 0, False),
        ({}, 1, False),
        ({"train_call": "1"}, 1, False),
    ],
)
def test_a_train_call_continues_only_from_its_own_checkpoints(
    meta: dict[str, Any], train_call: int | None, matches: bool
) -> None:
    assert matches_train_call(meta, train_call) is matches


def test_manifests_of_two_saves_of_a_step_are_no_checkpoint() -> None:
    manifests = [
        Manifest(name="checkpoint-20", step=20, attempt="a", save_id=f"s{index}", node=NodeOf(index=index, count=2), files=())
        for index in range(2)
    ]
    raw = {one.node.index: encode(one) for one in manifests}
    commit = commit_of(manifests, raw, committed_at="2026-03-01T12:00:00.000Z")
    with pytest.raises(ContractError, match="different saves"):
        check_node_set(commit, manifests)


def test_a_path_that_is_a_file_of_one_node_and_a_directory_of_another_is_refused() -> None:
    files = [FileEntry(path=path, key=f"checkpoint-20/{path}", size_bytes=1, crc64nvme="0" * 16) for path in ("a", "a/b")]
    check_paths(SAME, files[:1])
    with pytest.raises(ContractError, match=r"checkpoint-20: .* of different nodes"):
        check_paths(SAME, files)


def test_a_download_replaces_nothing_that_the_trainer_may_be_writing() -> None:
    finished = Finished("checkpoint-20", "v", 20, None, "a", Node(), 1.8e9, None, (), {})
    restored = replace(finished, meta={META_RESTORED: "0" * 16})
    assert may_replace(None, SAME, is_chosen=False)
    assert may_replace(restored, SAME, is_chosen=False)
    assert not may_replace(replace(finished, attempt="b"), SAME, is_chosen=True)
    assert may_replace(replace(finished, attempt="b"), SAME, is_chosen=False, is_superseded=True), "it is not sent"
    part = replace(finished, attempt="b", node=Node(1, 2))
    assert may_replace(part, SAME, is_chosen=True), "one node's part is not complete"
    assert not may_replace(part, SAME, is_chosen=False), "it may become"
    earlier, later = (f"20260101T00000{second}Z-a" for second in (1, 2))
    assert may_replace(replace(part, attempt=earlier), SAME.model_copy(update={"attempt": later}), is_chosen=False)
    assert not may_replace(replace(part, attempt=later), SAME.model_copy(update={"attempt": earlier}), is_chosen=False)
    assert may_replace_beside_trainer(restored, is_unchanged=True)
    assert not may_replace_beside_trainer(restored, is_unchanged=False)
    assert not may_replace_beside_trainer(finished, is_unchanged=True)
    assert not may_replace_beside_trainer(None, is_unchanged=True)


def test_steps_before_one_are_lower_and_final_has_none() -> None:
    assert steps_before(["final", "checkpoint-20", "checkpoint-10"], 20) == ["checkpoint-10"]
    assert steps_before(["final", "checkpoint-20"], None) == ["final", "checkpoint-20"]


STEPS = st.sets(st.integers(0, 8))


@given(STEPS, STEPS, st.none() | st.integers(0, 8))
def test_the_newest_untried_step_is_next_if_it_is_newer_than_the_volumes(
    stored: set[int], tried: set[int], local_step: int | None
) -> None:
    names = newest_first(f"checkpoint-{step}" for step in stored)
    got = next_to_try(names, {f"checkpoint-{step}" for step in tried}, local_step=local_step)
    newest = max(stored - tried, default=None)
    is_newer = newest is not None and (local_step is None or newest > local_step)
    assert got == (f"checkpoint-{newest}" if is_newer else None)
