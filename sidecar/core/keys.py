"""Names of everything in the store (FORMAT.md, "In the store"). Keys are relative to the store's root."""

from __future__ import annotations

from trainer_hook.contract import MARKER, SYSTEM_DIR, Node

RUN = "run.json"
ASKED = "run-asked.json"
"""Who wants to write below the prefix asks its holder for a sign of life."""
PROBE = ".ckpt-probe/"
"""Prefix of what the start-up probe writes and deletes."""


def folder(name: str) -> str:
    """Prefix of everything that belongs to a checkpoint."""
    return f"{name}/"


def commit(name: str) -> str:
    """The object whose existence makes a checkpoint durable (I1)."""
    return f"{name}/{MARKER}"


def manifests(name: str, attempt: str | None = None) -> str:
    """Prefix of the manifests of one attempt, or of all."""
    return f"{name}/{SYSTEM_DIR}/" if attempt is None else f"{name}/{SYSTEM_DIR}/{attempt}/"


def manifest(name: str, attempt: str, node: Node) -> str:
    """One node's manifest."""
    return f"{manifests(name, attempt)}node-{node.index:05d}-of-{node.count:05d}.json"


def manifests_of_nodes(name: str, attempt: str | None) -> str:
    """Prefix of the manifests of the nodes of an attempt, without what was made of them."""
    return f"{manifests(name, attempt)}node-"


def manifests_of_group(name: str, attempt: str, group: int) -> str:
    """Prefix of the manifests of the nodes whose index has ``group`` before its last two digits."""
    return f"{manifests(name, attempt)}node-{group:03d}"


def digests(name: str, attempt: str) -> str:
    """Prefix of the digests of all groups."""
    return f"{manifests(name, attempt)}group-"


def digest(name: str, attempt: str, group: int, count: int) -> str:
    """The manifests of one group of a job of ``count`` nodes in one object: a copy, read instead of them."""
    return f"{digests(name, attempt)}{group:03d}-of-{count:05d}.json"


def all_manifests(name: str, attempt: str) -> str:
    """The manifests of a commit of many nodes in one object: a copy, read instead of them."""
    return f"{manifests(name, attempt)}all.json"


def mending(name: str, attempt: str) -> str:
    """What the node that commits asks the others to send again."""
    return f"{manifests(name, attempt)}mend.json"


def shared_file(name: str, path: str) -> str:
    """Where a file lies under the name that it has on disk."""
    return f"{name}/{path}"


def node_file(name: str, attempt: str, node: Node, path: str) -> str:
    """Where a node's file lies whose name another node uses for other content (I6)."""
    return f"{manifests(name, attempt)}node-{node.index:05d}/{path}"
