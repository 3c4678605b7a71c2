from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.core.commit.commit import (
    Object,
    ReadyToCommit,
    Reupload,
    Wait,
    attempt_of,
    commit_of,
    decide,
)
from sidecar.core.commit.resume import check_listing, check_manifest, check_node_set, files_for
from sidecar.core.format import checksum, keys
from sidecar.core.format.manifest import FileEntry, Manifest, NodeOf, decode_commit, encode
from tests import strategies
from trainer_hook.contract import Node

NAME, ATTEMPT = "checkpoint-20", "a1"


def manifest(node: Node, entries: Sequence[FileEntry]) -> Manifest:
    index_of = NodeOf(index=node.index, count=node.count)
    return Manifest(name=NAME, step=20, attempt=ATTEMPT, node=index_of, files=tuple(entries))


def entry(path: str, content: bytes, *, key: str | None = None, etag: str = "e") -> FileEntry:
    return FileEntry(
        path=path,
        key=key or keys.shared_file(NAME, path),
        size_bytes=len(content),
        crc64nvme=checksum.text_of(content),
        etag=etag,
    )


# Few paths and contents, so that they collide.
PATHS = ["config.json", "model.pt", "rng.pth"]
CONTENTS = [b"", b"one", b"two", b"three"]
entries = st.builds(
    entry,
    st.sampled_from(PATHS),
    st.sampled_from(CONTENTS),
    key=st.none() | st.sampled_from(["checkpoint-20/model.pt", "checkpoint-20/other"]),
    etag=st.sampled_from(["e", "f", ""]),
)


@st.composite
def attempts(draw: st.DrawFn) -> tuple[list[Manifest], dict[str, Object], int]:
    """Manifests of some of the nodes in any order, a listing that nearly fits, and the number of nodes."""
    count = draw(st.integers(1, 4))
    indices = draw(st.lists(st.integers(0, count - 1), unique=True) | st.permutations(range(count)))
    manifests = [
        manifest(Node(index, count), draw(st.lists(entries, max_size=3, unique_by=lambda e: e.path))) for index in indices
    ]
    listing = strategies.listing_of(sorted(manifests, key=lambda m: -m.node.index))
    for key in draw(st.lists(st.sampled_from(sorted(listing)), max_size=1)) if listing else []:
        changes = [None, replace(listing[key], size_bytes=99), replace(listing[key], etag="else")]
        changed = draw(st.sampled_from(changes))
        listing = {k: v for k, v in listing.items() if k != key} | ({} if changed is None else {key: changed})
    return manifests, listing, count


def everything_is_there(manifests: Sequence[Manifest], listing: dict[str, Object], count: int) -> bool:
    """I2 spelled out, key by key."""
    if {m.node.index for m in manifests} != set(range(count)):
        return False
    for key in {e.key for m in manifests for e in m.files}:
        claims = [(m.node.index, e) for m in manifests for e in m.files if e.key == key]
        there = listing.get(key)
        recorded = {e.etag for _, e in claims}
        if there is None or len({e.crc64nvme for _, e in claims}) > 1:
            return False
        if any(e.size_bytes != there.size_bytes for _, e in claims):
            return False
        if there.etag not in recorded and recorded != {""}:
            return False
    return True


@settings(max_examples=400)
@given(attempts())
def test_ready_exactly_when_every_node_has_all_it_says_in_the_store(
    attempt: tuple[list[Manifest], dict[str, Object], int],
) -> None:
    manifests, listing, count = attempt
    for index in range(count):
        decision = decide(manifests, listing, me=Node(index, count))
        assert isinstance(decision, ReadyToCommit) == everything_is_there(manifests, listing, count), decision


@given(attempts())
def test_as_long_as_anything_is_missing_somebody_waits_or_mends_and_says_why(
    attempt: tuple[list[Manifest], dict[str, Object], int],
) -> None:
    manifests, listing, count = attempt
    decisions = [decide(manifests, listing, me=Node(index, count)) for index in range(count)]
    assert all(isinstance(d, ReadyToCommit) or d.reason for d in decisions)
    if not everything_is_there(manifests, listing, count):
        # Never does everybody wait for everybody: a node that has no manifest, or one that mends, goes on.
        assert any(isinstance(d, Reupload) for d in decisions)


@given(attempts())
def test_a_node_mends_only_files_of_its_own(attempt: tuple[list[Manifest], dict[str, Object], int]) -> None:
    manifests, listing, count = attempt
    for mine in manifests:
        node = Node(mine.node.index, count)
        decision = decide(manifests, listing, me=node)
        if isinstance(decision, Reupload):
            assert decision.files
            own = {e.path: e for e in mine.files}
            assert decision.files.keys() <= own.keys()
            for path, key in decision.files.items():
                assert key in (own[path].key, keys.node_file(NAME, ATTEMPT, node, path))


@given(attempts(), st.randoms(use_true_random=False))
def test_the_order_in_which_manifests_are_read_does_not_matter(
    attempt: tuple[list[Manifest], dict[str, Object], int], random: object
) -> None:
    manifests, listing, count = attempt
    shuffled = list(manifests)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for index in range(count):
        one, other = (decide(read, listing, me=Node(index, count)) for read in (manifests, shuffled))
        assert type(one) is type(other)
        assert not isinstance(one, Reupload) or one == other


# Whole uploads: nodes that know nothing of each other but the store, one request at a time in any order.


@dataclass
class World:
    objects: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    manifests: dict[int, Manifest] = field(default_factory=dict)
    committed: list[Manifest] | None = None
    stable_etags: bool = False
    puts: int = 0

    def listing(self) -> dict[str, Object]:
        return {key: Object(len(content), etag) for key, (content, etag) in self.objects.items()}

    def holds(self, manifests: Sequence[Manifest]) -> bool:
        return all(checksum.text_of(self.objects[e.key][0]) == e.crc64nvme for m in manifests for e in m.files)


class Pod:
    """One node: sends its files, publishes its manifest, and then decides until the step is committed."""

    def __init__(self, world: World, node: Node, files: dict[str, bytes]) -> None:
        self.world, self.node, self.files = world, node, files
        self.entries: dict[str, FileEntry] = {}
        self.to_send = {path: keys.shared_file(NAME, path) for path in files}
        self.published = False
        self.done = False

    def act(self) -> None:
        if self.to_send:
            self._send(*self.to_send.popitem())
        elif not self.published:
            written = manifest(self.node, [self.entries[path] for path in sorted(self.entries)])
            # The objects of a commit are never changed afterwards, even if a node still sends files again (I2).
            assert self.world.committed is None or written in self.world.committed
            self.world.manifests[self.node.index] = written
            self.published = True
        elif not self.done:
            self._decide()

    def _send(self, path: str, key: str) -> None:
        content = self.files[path]
        self.world.puts += 1
        # An etag is the content's, or the request's as with SSE-KMS.
        etag = checksum.text_of(content) if self.world.stable_etags else str(self.world.puts)
        self.world.objects[key] = (content, etag)
        self.entries[path] = entry(path, content, key=key, etag=etag)

    def _decide(self) -> None:
        if self.node.index in self.world.manifests and len(self.world.manifests) < self.node.count:
            return  # as the committer, which compares once all manifests are there, or its own is gone
        manifests = list(self.world.manifests.values())
        match decide(manifests, self.world.listing(), me=self.node):
            case ReadyToCommit():
                assert self.world.holds(manifests)
                self.world.committed = manifests
                self.done = True
            case Reupload(files):
                assert files or self.node.index not in self.world.manifests
                self.to_send, self.published = dict(files), False
            case Wait(reason):
                assert reason


@st.composite
def jobs(draw: st.DrawFn) -> list[dict[str, bytes]]:
    count = draw(st.integers(1, 4))
    files = st.dictionaries(st.sampled_from(PATHS), st.sampled_from(CONTENTS), max_size=3)
    return draw(st.lists(files, min_size=count, max_size=count))


@settings(max_examples=300)
@given(jobs(), st.lists(st.integers(0, 3), max_size=60), st.booleans())
def test_nodes_whose_files_collide_mend_until_the_step_is_committed_and_each_gets_its_own_back(
    job: list[dict[str, bytes]], schedule: list[int], stable_etags: bool
) -> None:
    world = World(stable_etags=stable_etags)
    pods = [Pod(world, Node(index, len(job)), files) for index, files in enumerate(job)]
    for turn in schedule:
        pods[turn % len(pods)].act()
    for _ in range(40):  # then everybody gets a turn
        for pod in pods:
            pod.act()

    assert world.committed is not None
    assert world.holds(world.committed)
    for pod in pods:
        got = {e.path: world.objects[e.key][0] for e in files_for(pod.node, world.committed)}
        assert got.items() >= pod.files.items()
        assert got.keys() == {path for files in job for path in files}


@settings(max_examples=200)
@given(jobs(), st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_manifests_that_others_delete_at_any_moment_only_delay_the_commit(
    job: list[dict[str, bytes]], schedule: list[tuple[int, bool]]
) -> None:
    world = World(stable_etags=True)
    pods = [Pod(world, Node(index, len(job)), files) for index, files in enumerate(job)]
    for turn, deletes in schedule:
        if deletes and world.committed is None:  # a slow node, which revokes the commit for the version being written
            world.manifests.pop(turn % len(pods), None)
        pods[turn % len(pods)].act()
    for _ in range(40):
        for pod in pods:
            pod.act()
    assert world.committed is not None
    assert world.holds(world.committed)


@given(jobs())
def test_the_lowest_node_keeps_the_name_on_disk_and_nobody_shares_it_for_other_content(job: list[dict[str, bytes]]) -> None:
    world = World()
    pods = [Pod(world, Node(index, len(job)), files) for index, files in enumerate(job)]
    for _ in range(40):
        for pod in pods:
            pod.act()
    for path in {path for files in job for path in files}:
        owner = next(files for files in job if path in files)
        assert world.objects[keys.shared_file(NAME, path)][0] == owner[path]
    for pod in pods:
        for path, content in pod.files.items():
            owner = next(files for files in job if path in files)
            shared = pod.entries[path].key == keys.shared_file(NAME, path)
            assert not shared or owner[path] == content
            assert shared or any(files.get(path, content) != content for files in job)


@given(jobs())
def test_what_is_committed_passes_every_check_of_a_resume(job: list[dict[str, bytes]]) -> None:
    world = World()
    pods = [Pod(world, Node(index, len(job)), files) for index, files in enumerate(job)]
    for _ in range(40):
        for pod in pods:
            pod.act()
    assert world.committed is not None
    raw = {m.node.index: encode(m) for m in world.committed}
    commit = decode_commit(encode(commit_of(world.committed, raw, committed_at="2026-03-01T12:00:00Z")), key=keys.commit(NAME))
    for named in commit.manifests:
        index = int(named.key.rpartition("node-")[2][:5])
        check_manifest(named, raw[index])
    check_node_set(commit, world.committed)
    check_listing(world.committed, {key: there.size_bytes for key, there in world.listing().items()})
    named_objects = {e.key: e.size_bytes for m in world.committed for e in m.files}
    assert (commit.files, commit.size_bytes) == (len(named_objects), sum(named_objects.values()))
    assert (commit.step, commit.attempt, len(commit.manifests)) == (20, ATTEMPT, len(job))


def test_a_node_waits_for_the_others_and_names_them() -> None:
    only = manifest(Node(1, 3), [entry("a", b"one")])
    decision = decide([only], strategies.listing_of([only]), me=Node(1, 3))
    assert decision == Wait("waiting for node 0, 2 of 3")


def test_a_thousand_missing_nodes_make_a_short_reason() -> None:
    only = manifest(Node(0, 1000), [])
    decision = decide([only], {}, me=Node(0, 1000))
    assert decision == Wait("waiting for node 1, 2, 3, 4, 5, 6, 7, 8 … of 1000")


def test_a_node_whose_manifest_is_gone_publishes_it_again_and_sends_no_file() -> None:
    other = manifest(Node(0, 2), [entry("a", b"one")])
    decision = decide([other], strategies.listing_of([other]), me=Node(1, 2))
    assert decision == Reupload({}, "this node's own manifest is not in the store any more")


def test_a_second_node_with_other_content_moves_its_file_below_its_own_folder() -> None:
    first, second = manifest(Node(0, 2), [entry("rng.pth", b"one")]), manifest(Node(1, 2), [entry("rng.pth", b"two")])
    listing = {"checkpoint-20/rng.pth": Object(3, "e")}
    moved = decide([first, second], listing, me=Node(1, 2))
    assert isinstance(moved, Reupload)
    assert moved.files == {"rng.pth": "checkpoint-20/.ckpt/a1/node-00001/rng.pth"}
    assert decide([first, second], listing, me=Node(0, 2)) == Wait("node 1 has to send rng.pth again")


def test_an_object_that_somebody_overwrote_with_the_same_size_is_sent_again_by_its_owner() -> None:
    first = manifest(Node(0, 1), [entry("rng.pth", b"one", etag="mine")])
    decision = decide([first], {"checkpoint-20/rng.pth": Object(3, "theirs")}, me=Node(0, 1))
    assert isinstance(decision, Reupload)
    assert decision.files == {"rng.pth": "checkpoint-20/rng.pth"}


def test_the_owner_sends_again_what_a_node_with_other_content_overwrote() -> None:
    both = [
        manifest(Node(0, 2), [entry("rng.pth", b"one", etag="0")]),
        manifest(Node(1, 2), [entry("rng.pth", b"two", etag="1")]),
    ]
    assert isinstance(decide(both, {"checkpoint-20/rng.pth": Object(3, "1")}, me=Node(0, 2)), Reupload)


def test_an_equal_file_of_two_nodes_may_have_been_sent_last_by_either() -> None:
    both = [manifest(Node(index, 2), [entry("a", b"one", etag=str(index))]) for index in (0, 1)]
    for etag in ("0", "1"):
        assert isinstance(decide(both, {"checkpoint-20/a": Object(3, etag)}, me=Node(0, 2)), ReadyToCommit)


def test_an_equal_file_of_two_nodes_that_a_third_overwrote_is_sent_again_by_the_lower_one_alone() -> None:
    both = [manifest(Node(index, 2), [entry("a", b"one", etag=str(index))]) for index in (0, 1)]
    assert isinstance(decide(both, {"checkpoint-20/a": Object(3, "2")}, me=Node(0, 2)), Reupload)
    for read in (both, both[::-1]):
        assert decide(read, {"checkpoint-20/a": Object(3, "2")}, me=Node(1, 2)) == Wait("node 0 has to send a again")


def test_nothing_is_sent_again_before_everybody_has_uploaded() -> None:
    only = manifest(Node(0, 2), [entry("a", b"one")])
    assert decide([only], {}, me=Node(0, 2)) == Wait("waiting for node 1 of 2")


def test_a_checkpoint_without_files_of_this_node_is_ready() -> None:
    assert isinstance(decide([manifest(Node(0, 1), [])], {}, me=Node(0, 1)), ReadyToCommit)


@given(strategies.ids, st.integers(0, 9))
def test_the_key_of_a_manifest_says_whose_it_is(attempt: str, index: int) -> None:
    key = keys.manifest(NAME, attempt, Node(index, 10))
    assert attempt_of(key, NAME) == attempt
    assert attempt_of(key, "checkpoint-2") is None


@pytest.mark.parametrize(
    "key",
    [
        "checkpoint-20/model.json",
        "checkpoint-20/.complete",
        "checkpoint-20/.ckpt/a1/node-00001/tokenizer.json",
        "checkpoint-20/.ckpt/config.json",
        "checkpoint-20/.ckpt/a1/rng.pth",
        "checkpoint-20/.ckpt/a1/",
    ],
)
def test_files_are_no_manifests_whatever_their_name(key: str) -> None:
    assert attempt_of(key, NAME) is None
