"""Values of the contract for property tests."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from sidecar.core.commit.commit import Object
from sidecar.core.format import checksum, keys
from sidecar.core.format.manifest import (
    MAX_DOCUMENT_BYTES,
    MAX_MANIFESTS_BYTES,
    Commit,
    FileEntry,
    Manifest,
    ManifestEntry,
    NodeOf,
)
from sidecar.core.format.obstacles import contradiction
from trainer_hook import contract
from trainer_hook.contract import ListedFile, Marker, Node, TrainerState

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
DIGITS = "0123456789"

steps = st.integers(0, 10**18 - 1)
small_steps = st.integers(0, 500)
ids = st.builds(str.__add__, st.sampled_from(LETTERS + DIGITS), st.text(LETTERS + DIGITS + "._-", max_size=127))
crcs = st.integers(0, 2**64 - 1).map(checksum.to_text)
timestamps = st.floats(-6e10, 2.5e11).map(contract.rfc3339)
names = st.one_of(st.just(contract.FINAL), steps.map(contract.checkpoint_name))

_text = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=20)


def _is_path(path: str) -> bool:
    try:
        contract.check_path(path)
    except contract.ContractError:
        return False
    return True


def _can_lie_together(files: tuple[FileEntry, ...]) -> bool:
    return contradiction(file.path for file in files) is None


# Of the control characters those above ASCII (C1) are part of names, too: Linux and S3 take them.
_name = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20).filter(_is_path)
paths = st.lists(_name, min_size=1, max_size=4).map("/".join).filter(_is_path)

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _text,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(_text, children, max_size=4),
    max_leaves=8,
)
metas = st.dictionaries(_text, json_values, max_size=3)


def _unique_files(entries: Any) -> Any:
    return st.lists(entries, max_size=5, unique_by=lambda f: f.path).map(tuple)


@st.composite
def nodes(draw: st.DrawFn, most: int = 99_999) -> Node:
    count = draw(st.integers(1, most))
    return Node(draw(st.integers(0, count - 1)), count)


def markers(step: st.SearchStrategy[int | None] | None = None) -> st.SearchStrategy[Marker]:
    def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.none() | values

    return st.builds(
        Marker,
        step=maybe(steps) if step is None else step,
        reason=maybe(st.sampled_from(sorted(contract.REASONS))),
        created_at=maybe(timestamps),
        attempt=maybe(ids),
        node=maybe(nodes()),
        world_size=maybe(st.integers(1, 2**40)),
        global_step_seconds=maybe(st.floats(0, 1e9)),
        files=maybe(_unique_files(st.builds(ListedFile, paths, st.integers(0, 2**50)))),
        meta=metas,
    )


trainer_states = st.builds(
    TrainerState,
    state=st.sampled_from(sorted(contract.names.TRAINER_STATES)),
    attempt=st.none() | ids,
    step=st.none() | steps,
    world_size=st.none() | st.integers(1, 2**40),
    pid=st.none() | st.integers(0, 2**22),
    updated_at=st.none() | timestamps,
    total_steps=st.none() | steps,
    loss=st.none() | st.floats(-1e299, 1e299),
    save_error=st.none() | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=50),
)

FIELDS = [
    "format",
    "step",
    "reason",
    "created_at",
    "attempt",
    "node",
    "world_size",
    "global_step_seconds",
    "files",
    "meta",
    "index",
    "count",
    "path",
    "size_bytes",
    "state",
    "pid",
    "updated_at",
    "id",
    "action",
    "at",
    "source",
    "name",
    "key",
    "crc64nvme",
    "etag",
    "part_bytes",
    "manifests",
    "committed_at",
]

any_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([1, 10**19, 10**400, -1])
    | st.floats()
    | st.text(st.characters(), max_size=10)
    | st.sampled_from(
        ["periodic", "running", "save", "checkpoint-20", "2026-01-01T00:00:00Z", "9999-12-31T23:59:59-01:00", ".."]
    ),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), children, max_size=6),
    max_leaves=20,
)


@st.composite
def damaged(draw: st.DrawFn, documents: st.SearchStrategy[bytes]) -> bytes:
    """A document with a byte changed, dropped or put in."""
    document = bytearray(draw(documents))
    at = draw(st.integers(0, len(document) - 1))
    byte = draw(st.integers(0, 255))
    match draw(st.sampled_from(["change", "drop", "insert"])):
        case "change":
            document[at] = byte
        case "drop":
            del document[at]
        case _:
            document.insert(at, byte)
    return bytes(document)


def hostile(documents: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Any bytes, any JSON with the contract's field names, and nearly valid documents."""
    as_json = any_json.map(lambda value: json.dumps(value).encode())
    return st.binary(max_size=200) | as_json | damaged(documents)


@st.composite
def manifests(draw: st.DrawFn, name: str | None = None, attempt: str | None = None, node: Node | None = None) -> Manifest:
    name = draw(names) if name is None else name
    attempt = draw(ids) if attempt is None else attempt
    node = draw(nodes()) if node is None else node

    def entry(path: str, size_bytes: int, crc: str, etag: str, part_bytes: int, own: bool) -> FileEntry:
        key = keys.node_file(name, attempt, node, path) if own else keys.shared_file(name, path)
        return FileEntry(path=path, key=key, size_bytes=size_bytes, crc64nvme=crc, etag=etag, part_bytes=part_bytes)

    sizes = st.integers(0, 2**50)
    step = contract.step_of(name)
    return Manifest(
        name=name,
        step=step if step is not None else draw(st.none() | steps),
        attempt=attempt,
        node=NodeOf(index=node.index, count=node.count),
        reason=draw(st.none() | st.sampled_from(sorted(contract.REASONS))),
        created_at=draw(st.none() | timestamps),
        world_size=draw(st.none() | st.integers(1, 1000)),
        meta=draw(metas),
        files=draw(_unique_files(st.builds(entry, paths, sizes, crcs, _text, sizes, st.booleans())).filter(_can_lie_together)),
    )


@st.composite
def commits(draw: st.DrawFn) -> Commit:
    name, attempt = draw(names), draw(ids)
    count = draw(st.integers(1, 4))
    step = contract.step_of(name)
    return Commit(
        name=name,
        step=step if step is not None else draw(st.none() | steps),
        attempt=attempt,
        reason=draw(st.none() | st.sampled_from(sorted(contract.REASONS))),
        created_at=draw(st.none() | timestamps),
        committed_at=draw(st.none() | timestamps),
        world_size=draw(st.none() | st.integers(1, 1000)),
        meta=draw(metas),
        files=draw(st.integers(0, 2**40)),
        size_bytes=draw(st.integers(0, 2**60)),
        manifests=tuple(
            ManifestEntry(
                key=keys.manifest(name, attempt, Node(index, count)),
                size_bytes=draw(st.integers(0, min(MAX_DOCUMENT_BYTES, MAX_MANIFESTS_BYTES // count))),
                crc64nvme=draw(crcs),
            )
            for index in range(count)
        ),
    )


def listing_of(manifests: list[Manifest]) -> dict[str, Object]:
    """A store that holds all that the manifests say."""
    return {entry.key: Object(entry.size_bytes, entry.etag) for manifest in manifests for entry in manifest.files}
