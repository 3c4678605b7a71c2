from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.commit.resume import files_for
from sidecar.core.format.manifest import FileEntry, Manifest, NodeOf
from sidecar.core.format.rank_layout import Share, left_out, private_files
from trainer_hook.contract import META_OWN_SHARDS, Node, checkpoint_name

PRIVATE = [
    "rng_state_{}.pth",
    "rank_{}.pt",
    "global_step20/zero_pp_rank_{}_mp_rank_00_optim_states.pt",
    "global_step20/bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt",
    "global_step20/zero_pp_rank_{}_mp_rank_00_model_states.pt",
    "deepspeed/zero_pp_rank_{}_mp_rank_00_optim_states.pt",
    "sharded/__{}_0.distcp",
]
SHARED = [
    "model.safetensors",
    "optimizer.pt",
    "trainer_state.json",
    "latest",
    "sharded/.metadata",
    "global_step20/mp_rank_00.pt",
]
UNKNOWN = [
    "rng_state_{}.pth.bak",
    "rng_state_0{}.pth",
    "mine/rng_state_{}.pth",
    "rank_{}.pth",
    "optimizer_0/__{}_0.distcp",
    "global_step20/zero_pp_rank_{}_mp_rank_01_optim_states.pt",
    "random_states_{}.pkl",
    "replay_buffer_{}.npz",
]


def manifest(index: int, count: int, paths: Sequence[str], *, world_size: int | None, name: str, promised: bool) -> Manifest:
    files = tuple(
        FileEntry(path=path, key=f"{name}/{path}", size_bytes=1, crc64nvme=f"{index:016x}") for path in dict.fromkeys(paths)
    )
    meta = {META_OWN_SHARDS: True} if promised else {}
    node = NodeOf(index=index, count=count)
    return Manifest(name=name, attempt="a", node=node, world_size=world_size, meta=meta, files=files)


@st.composite
def saved(draw: st.DrawFn) -> tuple[list[Manifest], list[Share]]:
    """A checkpoint of several nodes, and the shares with which as many nodes come back, with any ranks on any node."""
    count, per_node = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    world_size = count * per_node
    kinds = draw(st.lists(st.sampled_from([*PRIVATE, *UNKNOWN]), unique=True, max_size=6))
    lost = draw(st.sets(st.sampled_from(range(world_size)), max_size=1))  # a rank that wrote nothing
    promised, name = draw(st.booleans()), draw(st.sampled_from(["checkpoint-20", "final"]))
    said = draw(st.sampled_from([world_size, world_size, None, world_size + 1]))
    manifests = []
    for index in range(count):
        paths = draw(st.lists(st.sampled_from(SHARED), max_size=3)) + [
            kind.format(rank) for kind in kinds for rank in range(index * per_node, (index + 1) * per_node) if rank not in lost
        ]
        manifests.append(manifest(index, count, paths, world_size=said, name=name, promised=promised))
    ranks = draw(st.permutations(range(world_size)))
    shares = [Share(world_size, frozenset(ranks[index * per_node : (index + 1) * per_node])) for index in range(count)]
    return manifests, shares


def paths_of(manifests: Sequence[Manifest]) -> set[str]:
    return {entry.path for m in manifests for entry in m.files}


def fetched(manifests: Sequence[Manifest], index: int, count: int, share: Share | None) -> set[str]:
    return {entry.path for entry in files_for(Node(index, count), manifests, share)}


@given(saved())
def test_the_nodes_of_a_job_together_fetch_everything(found: tuple[list[Manifest], list[Share]]) -> None:
    manifests, shares = found
    by_node = [fetched(manifests, index, len(shares), share) for index, share in enumerate(shares)]
    assert set().union(*by_node) == paths_of(manifests)


@given(saved())
def test_each_rank_has_its_own_files_and_unknown_names_go_to_every_node(found: tuple[list[Manifest], list[Share]]) -> None:
    manifests, shares = found
    for index, share in enumerate(shares):
        there = fetched(manifests, index, len(shares), share)
        for rank in share.ranks:
            assert {kind.format(rank) for kind in PRIVATE} & paths_of(manifests) <= there
        for path in paths_of(manifests) - there:
            assert path in {kind.format(rank) for kind in PRIVATE for rank in set(range(share.world_size)) - share.ranks}


@given(saved(), st.integers(1, 4), st.integers(1, 12))
def test_another_job_than_the_one_that_saved_fetches_everything(
    found: tuple[list[Manifest], list[Share]], count: int, world_size: int
) -> None:
    manifests, shares = found
    everything = paths_of(manifests)
    assert fetched(manifests, 0, len(shares), None) == everything
    if count != len(manifests):
        assert fetched(manifests, 0, count, shares[0]) == everything
    if world_size != manifests[0].world_size:
        assert fetched(manifests, 0, len(shares), Share(world_size, frozenset({0}))) == everything


@given(saved())
def test_of_a_path_that_nodes_use_for_different_content_each_gets_its_own(found: tuple[list[Manifest], list[Share]]) -> None:
    manifests, shares = found
    for index, share in enumerate(shares):
        own = {entry.path: entry for entry in manifests[index].files}
        for entry in files_for(Node(index, len(shares)), manifests, share):
            assert own.get(entry.path, entry) == entry


def two_nodes(kind: str, *, ranks: Sequence[Sequence[int]] = ((0, 1), (2, 3)), promised: bool = False) -> list[Manifest]:
    return [
        manifest(i, 2, [kind.format(rank) for rank in held], world_size=4, name=checkpoint_name(20), promised=promised)
        for i, held in enumerate(ranks)
    ]


SECOND = Share(4, frozenset({2, 3}))


@pytest.mark.parametrize("kind", PRIVATE[:-1])
def test_private_files_of_other_nodes_are_left_out(kind: str) -> None:
    assert left_out(two_nodes(kind), SECOND, nodes=2) == {kind.format(0), kind.format(1)}


def test_shards_are_left_out_only_where_the_writer_said_that_nobody_else_reads_them() -> None:
    assert left_out(two_nodes(PRIVATE[-1]), SECOND, nodes=2) == frozenset()
    assert left_out(two_nodes(PRIVATE[-1], promised=True), SECOND, nodes=2) == {"sharded/__1_0.distcp"}
    said, unsaid = two_nodes(PRIVATE[-1], promised=True)[0], two_nodes(PRIVATE[-1])[1]
    assert left_out([said, unsaid], SECOND, nodes=2) == frozenset(), "one node has not said it"
    of_some_ranks = two_nodes(PRIVATE[-1], ranks=((1,), (3,)), promised=True)
    assert left_out(of_some_ranks, SECOND, nodes=2) == {"sharded/__1_0.distcp"}


def test_nodes_that_disagree_on_the_number_of_ranks_have_no_private_files() -> None:
    first, second = two_nodes("rng_state_{}.pth")
    assert private_files([first, second.model_copy(update={"world_size": 5})]) == {}


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        (((0, 1), (2,)), "a rank has written none: the numbers may mean something else"),
        (((0, 1), (2, 4)), "a rank that the job does not have"),
        (((0, 1), (1, 2, 3)), "two nodes have the file of one rank"),
    ],
)
def test_names_that_do_not_fit_the_job_are_for_everybody(ranks: Sequence[Sequence[int]], why: str) -> None:
    assert private_files(two_nodes("rng_state_{}.pth", ranks=ranks)) == {}, why


def test_whoever_wants_all_files_gets_first_what_this_node_wrote_and_what_is_shared() -> None:
    order = [entry.path for entry in files_for(Node(1, 2), two_nodes("rng_state_{}.pth"))]
    assert order == ["rng_state_2.pth", "rng_state_3.pth", "rng_state_0.pth", "rng_state_1.pth"]


@pytest.mark.parametrize(("world_size", "ranks"), [(2, {2}), (2, {-1}), (2, {-1, 1}), (2, {1, 2}), (2, set())])
def test_a_share_of_ranks_that_do_not_exist_is_refused(world_size: int, ranks: set[int]) -> None:
    with pytest.raises(ValueError, match="must be some of 0"):
        Share(world_size, frozenset(ranks))
