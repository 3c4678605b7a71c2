from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.commit.rewrite import AlreadyCommitted, KeepExisting, Replace, rewrite
from sidecar.core.format.checksum import text_of
from sidecar.core.format.manifest import Commit, FileEntry, Manifest, ManifestEntry, NodeOf

NAME = "checkpoint-20"
STAMPS = [f"2026-01-0{day}T00:00:00Z" for day in range(1, 6)]


def entry(path: str, content: bytes, key: str = "") -> FileEntry:
    key = key or f"{NAME}/{path}"
    return FileEntry(path=path, key=key, size_bytes=len(content), crc64nvme=text_of(content))


def part(attempt: str, created_at: str, files: list[FileEntry]) -> Manifest:
    node = NodeOf(index=0, count=1)
    return Manifest(name=NAME, step=20, attempt=attempt, node=node, created_at=created_at, files=tuple(files))


def commit(attempt: str, created_at: str | None) -> Commit:
    named = ManifestEntry(key=f"{NAME}/.ckpt/{attempt}/node-00000-of-00001.json", size_bytes=1, crc64nvme="0" * 16)
    return Commit(name=NAME, step=20, attempt=attempt, created_at=created_at, manifests=(named,))


contents = st.dictionaries(st.sampled_from("abc"), st.binary(max_size=3), min_size=1)
attempts = st.sampled_from(["a", "b"])
stamps = st.sampled_from(STAMPS)


@given(contents, attempts, attempts, stamps, stamps)
def test_equal_content_is_durable_whoever_wrote_it_and_wherever_it_lies(
    files: dict[str, bytes], ours: str, theirs: str, our_time: str, their_time: str
) -> None:
    there = part(theirs, their_time, [entry(path, content, key=f"{NAME}/elsewhere") for path, content in files.items()])
    here = [entry(path, content) for path, content in files.items()]
    decision = rewrite(attempt=ours, created_at=our_time, files=here, theirs=commit(theirs, their_time), part=there)
    assert decision == AlreadyCommitted()


@given(st.none() | contents, contents, attempts, attempts, stamps, stamps)
def test_a_commit_gives_way_only_to_what_is_strictly_later(
    ours: dict[str, bytes] | None, theirs: dict[str, bytes], attempt: str, their_attempt: str, our_time: str, their_time: str
) -> None:
    there = part(their_attempt, their_time, [entry(path, content) for path, content in theirs.items()])
    here = None if ours is None else [entry(path, content) for path, content in ours.items()]
    committed = commit(their_attempt, their_time)
    decision = rewrite(attempt=attempt, created_at=our_time, files=here, theirs=committed, part=there)
    if ours == theirs:
        assert decision == AlreadyCommitted()
    elif attempt == their_attempt:
        assert (decision == Replace()) == (our_time != their_time)
    else:
        assert (decision == Replace()) == (our_time > their_time)


def test_a_directory_that_differs_under_an_unchanged_marker_is_torn() -> None:
    there = part("a", "2026-01-01T00:00:00Z", [entry("model", b"whole")])
    committed = commit("a", "2026-01-01T00:00:00Z")
    for stamp in ("2026-01-01T00:00:00Z", "2026-01-01T00:00:00+00:00"):
        decision = rewrite(attempt="a", created_at=stamp, files=None, theirs=committed, part=there)
        assert isinstance(decision, KeepExisting)
        assert decision.torn


@given(contents, contents, stamps, stamps)
def test_a_marker_that_names_no_attempt_replaces_nothing_because_another_pod_reads_it(
    ours: dict[str, bytes], theirs: dict[str, bytes], our_time: str, their_time: str
) -> None:
    there = part(EARLIER, their_time, [entry(path, content) for path, content in theirs.items()])
    here = [entry(path, content) for path, content in ours.items()]
    committed = commit(EARLIER, their_time)
    decision = rewrite(attempt=LATER, created_at=our_time, files=here, theirs=committed, part=there, names_attempt=False)
    if ours == theirs:
        assert decision == AlreadyCommitted()
    elif our_time == their_time:
        assert isinstance(decision, KeepExisting)
        assert decision.torn
    else:
        assert decision == Replace()


@pytest.mark.parametrize("their_time", [None, "no time"])
def test_a_commit_without_a_time_protects_nothing(their_time: str | None) -> None:
    decision = rewrite(attempt="b", created_at=STAMPS[0], files=None, theirs=commit("a", their_time), part=None)
    assert decision == Replace()


def test_a_node_that_the_commit_does_not_know_may_write_its_attempt_anew() -> None:
    committed = commit("a", STAMPS[0])
    assert rewrite(attempt="a", created_at=STAMPS[0], files=None, theirs=committed, part=None) == Replace()


EARLIER, LATER = "20260301T120000Z-aaaaaaaa", "20260302T120000Z-bbbbbbbb"


@given(contents, contents, stamps, stamps)
def test_an_attempt_that_began_later_goes_first_whenever_its_steps_were_finished(
    ours: dict[str, bytes], theirs: dict[str, bytes], our_time: str, their_time: str
) -> None:
    if ours == theirs:
        return
    here = [entry(path, content) for path, content in ours.items()]
    for mine, other in ((EARLIER, LATER), (LATER, EARLIER)):
        there = part(other, their_time, [entry(path, content) for path, content in theirs.items()])
        decision = rewrite(attempt=mine, created_at=our_time, files=here, theirs=commit(other, their_time), part=there)
        assert isinstance(decision, Replace) == (mine == LATER)


def test_an_earlier_save_of_the_attempt_does_not_replace_a_later_one() -> None:
    here = [entry("a", b"old")]
    committed = commit("a", STAMPS[1]).model_copy(update={"save_id": "2"})
    there = part("a", STAMPS[1], [entry("a", b"new")]).model_copy(update={"save_id": "2"})
    decision = rewrite(attempt="a", created_at=STAMPS[0], files=here, theirs=committed, part=there, save_id="1")
    assert isinstance(decision, KeepExisting)
    assert decision.reason == "a later save of this step is committed"
    again = rewrite(attempt="a", created_at=STAMPS[0], files=here, theirs=committed, part=None, save_id="3")
    assert again == Replace()


def test_a_save_within_the_second_of_the_committed_one_is_another_save_and_not_torn() -> None:
    committed = commit("a", STAMPS[1]).model_copy(update={"save_id": "1"})
    there = part("a", STAMPS[1], [entry("a", b"old")]).model_copy(update={"save_id": "1"})
    here = [entry("a", b"new")]
    for files in (here, None):
        assert rewrite(attempt="a", created_at=STAMPS[1], files=files, theirs=committed, part=there, save_id="2") == Replace()
    for same in ("1", None):
        torn = rewrite(attempt="a", created_at=STAMPS[1], files=here, theirs=committed, part=there, save_id=same)
        assert isinstance(torn, KeepExisting)
        assert torn.torn


def test_of_several_nodes_an_equal_part_alone_does_not_make_another_writing_durable() -> None:
    here = [entry("config", b"{}")]
    there = part("a", STAMPS[0], here)
    one = commit("a", STAMPS[0])
    two = one.model_copy(update={"manifests": one.manifests * 2})
    assert rewrite(attempt="b", created_at=STAMPS[1], files=here, theirs=one, part=there) == AlreadyCommitted()
    assert rewrite(attempt="b", created_at=STAMPS[1], files=here, theirs=two, part=there) == Replace()


def test_a_part_of_an_earlier_attempt_is_durable_if_it_is_equal_and_else_the_commit_stays() -> None:
    there = part("b", STAMPS[1], [entry("config", b"{}")])
    later = commit("b", STAMPS[1])
    of_two = later.model_copy(update={"manifests": later.manifests * 2})
    for content, decided in ((b"{}", AlreadyCommitted()), (b"[]", KeepExisting("attempt b is the later one of this step"))):
        here = [entry("config", content)]
        assert rewrite(attempt="a", created_at=STAMPS[0], files=here, theirs=of_two, part=there) == decided


@given(st.none() | contents, contents, st.integers(1, 4), st.integers(1, 4), stamps, stamps)
def test_the_commit_of_an_earlier_pod_gives_way_whatever_clocks_say_and_a_higher_epoch_is_left_to_the_lease(
    ours: dict[str, bytes] | None, theirs: dict[str, bytes], epoch: int, their_epoch: int, our_time: str, their_time: str
) -> None:
    there = part("b", their_time, [entry(path, content) for path, content in theirs.items()])
    here = None if ours is None else [entry(path, content) for path, content in ours.items()]
    standing = commit("b", their_time).model_copy(update={"epoch": their_epoch})
    decision = rewrite(attempt="a", created_at=our_time, files=here, theirs=standing, part=there, epoch=epoch)
    if ours == theirs:
        assert decision == AlreadyCommitted()
    else:
        assert (decision == Replace()) == (epoch > their_epoch or our_time > their_time)
