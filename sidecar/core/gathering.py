"""Who looks for what, and how often, while the nodes of a job wait for each other (FORMAT.md, "How a node decides to commit").

All nodes see the same store and none knows which others are alive. So turns are a matter of time: the lowest index acts at
once, each other one the later the higher its index is, and finds the work done unless all before it are dead. A job of more
than ``GROUP`` nodes is gathered in two stages: one node of each group puts the manifests of its group into one *digest*, and
one node reads the digests. So a commit costs a number of requests in proportion to the number of nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sidecar.core import keys
from trainer_hook.contract import Node

EAGER_NODES = 16
"""Up to so many, whoever sees the last manifest commits at once: that some do it at the same time costs little."""
GROUP = 100
"""Nodes of a group: those whose index has the same digits but the last two, so that one listing finds them."""
LOOK_S = 1.0
"""Shortest time between two looks of a node that waits."""
LOOKS_PER_S = 1000
"""Looks of all nodes together, at most: a fifth of what S3 allows below one prefix."""
PUBLISHED_PER_S = 3000
"""Manifests of all nodes together, at most: S3 takes 3,500 writes a second below one prefix."""
HANDOVER_S = 3.0
"""How long a node that could act waits for the one before it in the order."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A node's place in the order. ``position`` counts within its group."""

    node: Node

    @property
    def group(self) -> int:
        """Of its nodes."""
        return self.node.index // GROUP

    @property
    def position(self) -> int:
        """In its group; 0 acts first."""
        return self.node.index % GROUP

    @property
    def is_eager(self) -> bool:
        """Whether the job is so small that nobody waits for his turn."""
        return self.node.count <= EAGER_NODES

    @property
    def is_grouped(self) -> bool:
        """Whether the job is gathered in two stages."""
        return self.node.count > GROUP

    @property
    def look_s(self) -> float:
        """Time between two looks whether the step is committed."""
        return max(LOOK_S, self.node.count / LOOKS_PER_S)

    @property
    def list_s(self) -> float:
        """Time between two looks which manifests of the group are there: their sum over a group grows with its logarithm."""
        return LOOK_S if self.is_eager else LOOK_S * (self.position + 1)

    @property
    def publish_after_s(self) -> float:
        """How long to hold the manifest back, so that many nodes that end at the same instant do not write all at once."""
        return 0.0 if self.node.count <= PUBLISHED_PER_S else self.node.index / PUBLISHED_PER_S

    def patience_s(self, position: int) -> float:
        """How long to leave something to those before ``position`` after it could have been done."""
        return 0.0 if self.is_eager else HANDOVER_S * position


def members(group: int, count: int) -> range:
    """Return the indices of a group's nodes."""
    return range(group * GROUP, min(count, (group + 1) * GROUP))


def groups(count: int) -> range:
    """Return the groups of a job of ``count`` nodes."""
    return range((count + GROUP - 1) // GROUP)


def missing_nodes(name: str, attempt: str, indices: Iterable[int], count: int, *, there: Iterable[str]) -> list[int]:
    """Return the nodes whose manifest is not among the keys that are ``there``."""
    known = set(there)
    return [index for index in indices if keys.manifest(name, attempt, Node(index, count)) not in known]
