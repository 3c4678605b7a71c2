from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.format import keys
from tests import strategies
from trainer_hook.contract import Node


@given(strategies.names, strategies.ids, strategies.nodes(), strategies.paths)
def test_everything_of_a_checkpoint_lies_in_its_folder(name: str, attempt: str, node: Node, path: str) -> None:
    of_checkpoint = [
        keys.commit(name),
        keys.manifests(name),
        keys.manifests(name, attempt),
        keys.manifest(name, attempt, node),
        keys.shared_file(name, path),
        keys.node_file(name, attempt, node, path),
    ]
    assert all(key.startswith(keys.folder(name)) for key in of_checkpoint)
    assert keys.manifest(name, attempt, node).startswith(keys.manifests(name, attempt))
    assert keys.manifests(name, attempt).startswith(keys.manifests(name))


@given(strategies.names, st.lists(strategies.ids, min_size=1, max_size=3, unique=True), st.lists(strategies.paths, unique=True))
def test_no_two_things_of_a_checkpoint_share_a_key(name: str, attempts: list[str], paths: list[str]) -> None:
    nodes = [Node(index, 3) for index in range(3)]
    used = [keys.commit(name), *(keys.shared_file(name, path) for path in paths)]
    for attempt in attempts:
        used += [keys.manifest(name, attempt, node) for node in nodes]
        used += [keys.node_file(name, attempt, node, path) for node in nodes for path in paths]
    assert len(set(used)) == len(used)


@given(strategies.ids, st.lists(strategies.nodes(), min_size=2, max_size=2, unique=True))
def test_manifests_sort_like_the_indices_of_their_nodes(attempt: str, nodes: list[Node]) -> None:
    low, high = sorted(nodes, key=lambda n: (n.index, n.count))
    assert keys.manifest("final", attempt, low) < keys.manifest("final", attempt, high)


def test_the_names_of_the_format_document() -> None:
    node = Node(0, 2)
    assert keys.commit("checkpoint-20") == "checkpoint-20/.complete"
    assert keys.manifest("checkpoint-20", "a1", node) == "checkpoint-20/.ckpt/a1/node-00000-of-00002.json"
    assert keys.shared_file("checkpoint-20", "a/model.pt") == "checkpoint-20/a/model.pt"
    assert keys.node_file("checkpoint-20", "a1", Node(1, 2), "a/model.pt") == "checkpoint-20/.ckpt/a1/node-00001/a/model.pt"
    assert keys.RUN == "run.json"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("checkpoint-20/model", True),
        ("checkpoint-20/.ckpt/a1/node-00001/model", True),
        ("checkpoint-30/.ckpt/a1/node-00001/model", False),
        ("checkpoint-20/.ckpt/a1/node-00001/other", False),
        ("checkpoint-20/.ckpt/a1/node-0001/model", False),
        ("checkpoint-20/.ckpt/a1/b/node-00001/model", False),
        ("checkpoint-30/model", False),
    ],
)
def test_a_file_has_its_own_key_or_one_of_any_node_of_its_checkpoint(key: str, expected: bool) -> None:
    assert keys.is_key_of(key, "checkpoint-20", "model") is expected


def test_the_folder_of_checkpoint_2_is_no_prefix_of_checkpoint_20() -> None:
    assert not keys.commit("checkpoint-20").startswith(keys.folder("checkpoint-2"))


@given(strategies.names, strategies.ids, st.integers(0, 98_999))
def test_documents_derived_from_manifests_are_apart_from_them(name: str, attempt: str, index: int) -> None:
    one, group = keys.manifest(name, attempt, Node(index, 99_000)), index // 100
    derived = [
        keys.bundle(name, attempt, group, 99_000),
        keys.all_manifests(name, attempt),
        keys.reupload_request(name, attempt),
    ]
    assert one.startswith(keys.manifests_of_group(name, attempt, group))
    assert one.startswith(keys.manifests_of_nodes(name, attempt))
    assert derived[0].startswith(keys.bundles(name, attempt))
    assert not [key for key in derived if key.startswith(keys.manifests_of_nodes(name, attempt))]
    assert keys.is_quarantine(keys.quarantined(name, "0" * 16), name)
