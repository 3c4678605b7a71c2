"""``.complete``: the file that makes a directory a finished checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer_hook.contract.names import (
    DOWNLOAD_META_BYTES,
    FORMAT,
    MAX_MARKER_BYTES,
    MAX_META_BYTES,
    MAX_META_DEPTH,
    MAX_NODES,
    META_OWNER,
    META_RESTORED,
    META_TRAIN_CALL,
    REASONS,
    SCRIPT_OWNED,
    ContractError,
    check_id,
    check_path,
    step_of,
)
from trainer_hook.contract.typed_json import encode_json, expect_format, integer, json_object, one_of, seconds, timestamp, typed


@dataclass(frozen=True, slots=True)
class Node:
    """Place of this pod in the job: ``index`` from 0, below ``count``."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ContractError(f"node {self.index} of {self.count} does not exist: index must be 0 … count-1")
        if self.count > MAX_NODES:
            raise ContractError(f"node count {self.count} is larger than {MAX_NODES}")


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file of the checkpoint, complete at this size. ``path`` is relative to the checkpoint, with forward slashes."""

    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Marker:
    """Content of ``.complete``. ``None``: the writer did not set the field; an empty file is ``Marker()``."""

    step: int | None = None
    reason: str | None = None
    created_at: str | None = None
    attempt: str | None = None
    save_id: str | None = None
    """Id of this save of the step, the same on all nodes: parts of different saves are never committed together."""
    node: Node | None = None
    world_size: int | None = None
    global_step_seconds: float | None = None
    files: tuple[ListedFile, ...] | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)


def parse_marker(raw: bytes, *, name: str) -> Marker:
    """Read the content of ``<name>/.complete``. Raises ``ContractError``: not format 1; the text says which field."""
    if len(raw) > MAX_MARKER_BYTES:
        raise ContractError(f"marker of {len(raw)} bytes is larger than {MAX_MARKER_BYTES}")
    if not raw.strip():
        return Marker()
    fields = json_object(raw, what="marker")
    expect_format(fields)
    step = integer(fields, "step")
    named = step_of(name)
    if step is not None and named is not None and step != named:
        raise ContractError(f"marker says step {step}, directory is named {name}")
    attempt, save_id = typed(fields, "attempt", str), typed(fields, "save_id", str)
    return Marker(
        step=step,
        reason=one_of(fields, "reason", REASONS),
        created_at=timestamp(fields, "created_at"),
        attempt=None if attempt is None else check_id(attempt, what="attempt"),
        save_id=None if save_id is None else check_id(save_id, what="save_id"),
        node=_node(fields),
        world_size=integer(fields, "world_size", least=1),
        global_step_seconds=seconds(fields, "global_step_seconds"),
        files=_files(fields),
        meta=_meta(fields),
    )


def encode_marker(marker: Marker) -> bytes:
    """Return the JSON of a marker; fields that are ``None`` are left out."""
    fields: dict[str, Any] = {
        "format": FORMAT,
        "step": marker.step,
        "reason": marker.reason,
        "created_at": marker.created_at,
        "attempt": marker.attempt,
        "save_id": marker.save_id,
        "node": None if marker.node is None else {"index": marker.node.index, "count": marker.node.count},
        "world_size": marker.world_size,
        "global_step_seconds": marker.global_step_seconds,
        "files": None if marker.files is None else [{"path": f.path, "size_bytes": f.size_bytes} for f in marker.files],
        "meta": dict(marker.meta) or None,
    }
    return encode_json(fields)


def _meta(fields: Mapping[str, Any]) -> dict[str, Any]:
    meta: dict[str, Any] = typed(fields, "meta", dict) or {}
    if not _is_shallow(meta, MAX_META_DEPTH):
        raise ContractError(f"meta is nested deeper than {MAX_META_DEPTH}")
    try:
        # Python reads NaN, 1e999 and half surrogates, but they cannot be written into the documents of the store.
        json.dumps(meta, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise ContractError(f"meta holds what JSON cannot: {str(error)[:200]}") from None
    # A download adds keys of its own to the meta of the checkpoint's writer.
    if len(json.dumps(meta)) > MAX_META_BYTES + (DOWNLOAD_META_BYTES if META_RESTORED in meta else 0):
        raise ContractError(f"meta is larger than {MAX_META_BYTES} bytes")
    return meta


def _is_shallow(value: Any, levels: int) -> bool:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return children is None or (levels > 0 and all(_is_shallow(child, levels - 1) for child in children))


def _node(fields: Mapping[str, Any]) -> Node | None:
    node = typed(fields, "node", dict)
    if node is None:
        return None
    index, count = integer(node, "index"), integer(node, "count", least=1)
    if index is None or count is None:
        raise ContractError("node needs index and count")
    return Node(index, count)


def _files(fields: Mapping[str, Any]) -> tuple[ListedFile, ...] | None:
    listed = typed(fields, "files", list)
    if listed is None:
        return None
    files = []
    for entry in listed:
        if not isinstance(entry, dict):
            raise ContractError("files must hold objects with path and size_bytes")
        path, size_bytes = typed(entry, "path", str), integer(entry, "size_bytes")
        if path is None or size_bytes is None:
            raise ContractError("a listed file needs path and size_bytes")
        files.append(ListedFile(check_path(path), size_bytes))
    if len({f.path for f in files}) != len(files):
        raise ContractError("files lists a path twice")
    return tuple(files)


def version_of(inode: int, size_bytes: int, mtime_ns: int) -> str:
    """Return the version of a file such as a marker: writing it again changes it."""
    return f"{inode:x}-{size_bytes:x}-{mtime_ns:x}"


def train_call_of(meta: Mapping[str, Any]) -> int:
    """Return which ``train()`` call wrote ``meta``; 0: the first, or not recorded; -1: malformed."""
    said = meta.get(META_TRAIN_CALL, 0)
    return said if isinstance(said, int) else -1


def is_script_owned(meta: Mapping[str, Any]) -> bool:
    """Whether the training script itself rotates the checkpoint: neither the hook nor the sidecar deletes it."""
    return meta.get(META_OWNER) == SCRIPT_OWNED
