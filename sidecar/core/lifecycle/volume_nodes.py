"""Which node of its job wrote which checkpoint of a volume: a marker need not say it, and the job's number of nodes may change.

Without it, a job of fewer nodes takes its parts of an earlier job's step for all of the step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sidecar.core.lifecycle import volume_users
from trainer_hook.contract import ContractError, Node, encode_json
from trainer_hook.contract.typed_json import json_object

MOST_NODES = 16
"""Number of nodes that are remembered, the latest ones."""
MOST_VERSIONS = 10_000
"""Checkpoints that are remembered of each."""


@dataclass(frozen=True, slots=True)
class VolumeNode(volume_users.VolumeUser):
    """A node that used the volume."""

    node: Node | None
    """``None``: one of several, their number unknown."""


def taken_over(before: Sequence[VolumeNode], me: Node | None, present: Collection[str]) -> list[VolumeNode]:
    """Return the nodes of a volume once ``me`` uses it, the present one first.

    Args:
        before: The nodes until now, the latest first; none: the volume is new, or an earlier version used it.
        me: The present node.
        present: Versions of all finished checkpoints on the volume.
    """
    return volume_users.taken_over(before, VolumeNode(me), present, is_same=_is_same_node, most=MOST_NODES)


def _is_same_node(one: VolumeNode, other: VolumeNode) -> bool:
    return one.node == other.node


def node_of_versions(nodes: Sequence[VolumeNode]) -> dict[str, Node | None]:
    """Return the node of each checkpoint that another node than the present one, the first, has left."""
    return {version: known.node for known in nodes[1:] for version in known.versions}


def encode_nodes(nodes: Sequence[VolumeNode]) -> bytes:
    """Return the content of ``nodes.json``."""
    return encode_json({"nodes": [{**_fields(n.node), "versions": sorted(n.versions)[:MOST_VERSIONS]} for n in nodes]})


def decode_nodes(raw: bytes | None) -> list[VolumeNode]:
    """Return the nodes of ``nodes.json``; none: it is missing or malformed."""
    try:
        said = json_object(raw or b"{}", what="nodes.json").get("nodes")
    except ContractError:
        return []
    return [_decoded(each) for each in said[:MOST_NODES] if isinstance(each, Mapping)] if isinstance(said, list) else []


def _fields(node: Node | None) -> dict[str, int | None]:
    return {"index": None, "count": None} if node is None else {"index": node.index, "count": node.count}


def _decoded(fields: Mapping[str, Any]) -> VolumeNode:
    index, count, versions = fields.get("index"), fields.get("count"), fields.get("versions")
    known = versions if isinstance(versions, list) else []
    return VolumeNode(_node(index, count), versions=frozenset(v for v in known if isinstance(v, str)))


def _node(index: Any, count: Any) -> Node | None:
    is_known = type(index) is int and type(count) is int and 0 <= index < count
    return Node(index, count) if is_known else None
