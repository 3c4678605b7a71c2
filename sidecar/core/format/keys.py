"""Keys of all objects in the store (FORMAT.md, "In the store"), relative to the store's root."""

from __future__ import annotations

import re

from trainer_hook.contract import MARKER, SYSTEM_DIR, Node

RUN = "run.json"
ASKED = "run-asked.json"
"""Request of another pod to the holder of the prefix for a sign of life."""
CLAIMS = "run-claims/"
"""Prefix of the claims to the prefix, one object for each pod that took it over."""
_ARRIVED = f"{CLAIMS}arrived-"
_QUARANTINED = "quarantined-"
STEPS = "checkpoint-"
"""Prefix of all objects of all steps."""
PROBE = ".ckpt-probe/"
"""Prefix of the start-up probe's objects."""
_FOLDER_OF_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}/node-[0-9]{5}/", re.ASCII)


def arrival(holder_id: str) -> str:
    """Key of the object that a starting pod writes to see the store's clock, and deletes."""
    return f"{_ARRIVED}{holder_id}.json"


def folder(name: str) -> str:
    """Prefix of all objects of a checkpoint."""
    return f"{name}/"


def commit(name: str) -> str:
    """Key of the commit, the object whose existence makes a checkpoint durable (I1)."""
    return f"{name}/{MARKER}"


def manifests(name: str, attempt: str | None = None) -> str:
    """Prefix of the manifests of one attempt; ``None``: of all attempts."""
    return f"{name}/{SYSTEM_DIR}/" if attempt is None else f"{name}/{SYSTEM_DIR}/{attempt}/"


def manifest(name: str, attempt: str, node: Node) -> str:
    """Key of one node's manifest."""
    return f"{manifests(name, attempt)}node-{node.index:05d}-of-{node.count:05d}.json"


def manifests_of_nodes(name: str, attempt: str | None) -> str:
    """Prefix of the nodes' manifests of an attempt, without the documents derived from them."""
    return f"{manifests(name, attempt)}node-"


def manifests_of_group(name: str, attempt: str, group: int) -> str:
    """Prefix of the manifests of the nodes whose index has ``group`` before its last two digits."""
    return f"{manifests(name, attempt)}node-{group:03d}"


def bundles(name: str, attempt: str) -> str:
    """Prefix of the bundles of all groups."""
    return f"{manifests(name, attempt)}group-"


def bundle(name: str, attempt: str, group: int, count: int) -> str:
    """Key of a bundle: a copy of the manifests of one group, in a job of ``count`` nodes, which is read instead of them."""
    return f"{bundles(name, attempt)}{group:03d}-of-{count:05d}.json"


def all_manifests(name: str, attempt: str) -> str:
    """Key of a copy of all manifests of a commit of many nodes, which is read instead of them."""
    return f"{manifests(name, attempt)}all.json"


def reupload_request(name: str, attempt: str) -> str:
    """Key of the committing node's request to other nodes to upload files again."""
    return f"{manifests(name, attempt)}mend.json"


def quarantined(name: str, commit_crc64nvme: str) -> str:
    """Key of the record that the commit with this checksum, and no other one of the checkpoint, failed verification."""
    return f"{manifests(name)}{_QUARANTINED}{commit_crc64nvme}.json"


def deletion(name: str) -> str:
    """Key of the record that the deletion of a checkpoint has begun. It is deleted last."""
    return f"{manifests(name)}deletion.json"


def is_quarantine(key: str, name: str) -> bool:
    """Whether a key is that of a quarantine record."""
    return key.startswith(f"{manifests(name)}{_QUARANTINED}")


def is_of_commit_alone(key: str, name: str) -> bool:
    """Whether a key is that of a record about a commit, of its quarantine or its deletion, and no part of any writing."""
    return key == deletion(name) or is_quarantine(key, name)


def shared_file(name: str, path: str) -> str:
    """Key of a file under its name on disk."""
    return f"{name}/{path}"


def node_file(name: str, attempt: str, node: Node, path: str) -> str:
    """Key of a node's file whose path another node uses for other content (I6)."""
    return f"{manifests(name, attempt)}node-{node.index:05d}/{path}"


def is_key_of(key: str, name: str, path: str) -> bool:
    """Whether a file of this path in checkpoint ``name`` can have this key: the shared one, or one of any attempt and node."""
    prefix = manifests(name)
    is_in_folder = key.startswith(prefix) and key.endswith(f"/{path}")
    return key == shared_file(name, path) or (is_in_folder and bool(_FOLDER_OF_NODE.fullmatch(key[len(prefix) : -len(path)])))
