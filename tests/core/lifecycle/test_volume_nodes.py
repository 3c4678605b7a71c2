from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.lifecycle.volume_nodes import (
    MOST_NODES,
    VolumeNode,
    decode_nodes,
    encode_nodes,
    node_of_versions,
    taken_over,
)
from trainer_hook.contract import Node

nodes = st.sampled_from([Node(0, 1), Node(0, 2), Node(1, 2), Node(0, 3), None])
versions = st.frozensets(st.sampled_from([f"{number}-1-1" for number in range(6)]))


@given(st.lists(st.tuples(nodes, versions), max_size=8))
def test_each_checkpoint_stays_of_the_node_that_wrote_it(lives: list[tuple[Node | None, frozenset[str]]]) -> None:
    """Each life finds what is on the volume, and writes what was not there before."""
    known: list[VolumeNode] = []
    writer: dict[str, Node | None] = {}
    for me, present in lives:
        writer = {version: node for version, node in writer.items() if version in present}
        known = decode_nodes(encode_nodes(taken_over(known, me, writer)))
        assert known[0] == VolumeNode(me)
        assert node_of_versions(known) == {version: node for version, node in writer.items() if node != me}
        writer |= dict.fromkeys(present - set(writer), me)


def test_what_an_earlier_version_of_the_sidecar_left_counts_as_the_nodes_own() -> None:
    assert node_of_versions(taken_over([], Node(0, 1), ["1-1-1"])) == {}


def test_of_many_nodes_the_latest_are_remembered() -> None:
    known: list[VolumeNode] = []
    for count in range(1, MOST_NODES + 6):
        known = taken_over(known, Node(0, count), [f"{left}-1-1" for left in range(1, count)])
    assert len(known) == MOST_NODES
    assert known[1].node == Node(0, MOST_NODES + 4)


@pytest.mark.parametrize("raw", [None, b"", b"{", b"[]", b'{"nodes": 3}', b'{"nodes": [3]}', b'{"nodes": {}}', b"\xff"])
def test_a_record_that_is_missing_or_malformed_names_no_node(raw: bytes | None) -> None:
    assert decode_nodes(raw) == []


@pytest.mark.parametrize("said", ["{}", '{"index": 1, "count": 1}', '{"index": true, "count": 2}', '{"index": -1, "count": 2}'])
def test_a_node_that_cannot_be_is_unknown(said: str) -> None:
    assert decode_nodes(f'{{"nodes": [{said}]}}'.encode()) == [VolumeNode(None)]
