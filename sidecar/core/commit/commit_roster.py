"""Roster of a commit: which node polls the store for what, and when (FORMAT.md, "How a node decides to commit").

All nodes see the same store; none knows which others are alive. The order is therefore by time: the lowest index acts at once,
each other node later in proportion to its index, and finds the work done unless all nodes before it are dead. In a job of more
than ``GROUP`` nodes manifests are collected in two stages: one node of each group merges those of its group into one *bundle*,
and one node reads the bundles. So the requests of a commit are proportional to the number of nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sidecar.core.format import keys
from trainer_hook.contract import Node

EAGER_NODES = 16
"""Maximum job size in which every node that sees the last manifest commits at once; concurrent commits cost little there."""


def has_bundle(nodes: int) -> bool:
    """Whether the commit of a job of this many nodes has a bundle of all manifests next to it."""
    return nodes > EAGER_NODES


GROUP = 100
"""Nodes per group: those whose index differs in the last two digits alone, so that one listing finds their manifests."""
SHORTEST_POLL_S = 1.0
"""Shortest poll interval of a waiting node, in seconds."""
POLLS_PER_S = 1000
"""Maximum polls per second of all nodes together: a fifth of what S3 allows below one prefix."""
PUBLISHED_PER_S = 3000
"""Maximum manifests per second of all nodes together: S3 takes 3,500 writes a second below one prefix."""
HANDOVER_S = 3.0
"""Seconds for which a node that could act leaves the work to the node before it."""


@dataclass(frozen=True, slots=True)
class CommitTurn:
    """A node's position in the order of a commit."""

    node: Node

    @property
    def group(self) -> int:
        """Index of its group."""
        return self.node.index // GROUP

    @property
    def position(self) -> int:
        """Position in its group; 0 acts first."""
        return self.node.index % GROUP

    @property
    def is_eager(self) -> bool:
        """Whether the job is small enough for every node to act at once."""
        return not has_bundle(self.node.count)

    @property
    def is_grouped(self) -> bool:
        """Whether the job's manifests are collected in two stages."""
        return self.node.count > GROUP

    @property
    def poll_s(self) -> float:
        """Interval in seconds between two polls for the commit."""
        return max(SHORTEST_POLL_S, self.node.count / POLLS_PER_S)

    @property
    def list_s(self) -> float:
        """Interval in seconds between two listings of the group's manifests. A group's requests grow with its logarithm."""
        return SHORTEST_POLL_S if self.is_eager else SHORTEST_POLL_S * (self.position + 1)

    @property
    def publish_after_s(self) -> float:
        """Delay of the manifest in seconds, which spreads the writes of many nodes that finish together."""
        return 0.0 if self.node.count <= PUBLISHED_PER_S else self.node.index / PUBLISHED_PER_S

    def patience_s(self, position: int) -> float:
        """Seconds for which the node at ``position`` leaves possible work to the nodes before it."""
        return 0.0 if self.is_eager else HANDOVER_S * position


def members(group: int, count: int) -> range:
    """Return the indices of a group's nodes."""
    return range(group * GROUP, min(count, (group + 1) * GROUP))


def groups(count: int) -> range:
    """Return the groups of a job of ``count`` nodes."""
    return range((count + GROUP - 1) // GROUP)


def missing_nodes(name: str, attempt: str, indices: Iterable[int], count: int, *, there: Iterable[str]) -> list[int]:
    """Return the nodes whose manifest is not among the listed keys, ``there``."""
    known = set(there)
    return [index for index in indices if keys.manifest(name, attempt, Node(index, count)) not in known]
