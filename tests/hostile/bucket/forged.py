"""Committed steps of one node as FORMAT.md describes them, made without the sidecar's code, so that each rule can be broken."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sidecar.core.format.checksum import text_of
from sidecar.errors import StoreUnavailable
from sidecar.store.protocol import Store

ATTEMPT = "a"
CREATED_AT = "2026-01-01T00:00:00.000Z"
Fields = dict[str, Any]
Raw = Callable[[bytes], bytes]


def same(raw: bytes) -> bytes:
    return raw


def content_of(step: int) -> bytes:
    return b"weights of step %d " % step * 50


@dataclass
class Forged:
    """A step that is whole until a test changes it, and then puts it into a store."""

    step: int
    data: dict[str, bytes] = field(default_factory=dict)
    """Objects by key; ``put`` writes them."""
    manifest: Fields = field(default_factory=dict)
    commit: Fields = field(default_factory=dict)
    raw_manifest: Raw = same
    """Changes the bytes of the manifest before the commit records their checksum."""
    raw_commit: Raw = same
    extra: dict[str, bytes] = field(default_factory=dict)
    """Further objects."""

    def __post_init__(self) -> None:
        content = content_of(self.step)
        self.data = {f"{self.name}/model": content}
        common = {"format": 1, "name": self.name, "step": self.step, "attempt": ATTEMPT, "created_at": CREATED_AT}
        entry = {"path": "model", "key": f"{self.name}/model", "size_bytes": len(content), "crc64nvme": text_of(content)}
        self.manifest = common | {"node": {"index": 0, "count": 1}, "meta": {}, "files": [entry]}
        self.commit = common | {"meta": {}, "files": 1, "size_bytes": len(content)}

    @property
    def name(self) -> str:
        return f"checkpoint-{self.step}"

    @property
    def manifest_key(self) -> str:
        return f"{self.name}/.ckpt/{ATTEMPT}/node-00000-of-00001.json"

    @property
    def file(self) -> Fields:
        """Entry of the only file."""
        entry: Fields = self.manifest["files"][0]
        return entry

    def both(self, **fields: Any) -> None:
        """Change fields of the manifest and of the commit, which have to agree."""
        self.manifest |= fields
        self.commit |= fields

    def add(self, path: str, content: bytes, *, key: str | None = None) -> None:
        """Add a file."""
        key = key or f"{self.name}/{path}"
        self.manifest["files"].append({"path": path, "key": key, "size_bytes": len(content), "crc64nvme": text_of(content)})
        self.data[key] = content

    def put(self, store: Store) -> None:
        """Write data, manifest, commit."""
        manifest = self.raw_manifest(json.dumps(self.manifest).encode())
        entry = {"key": self.manifest_key, "size_bytes": len(manifest), "crc64nvme": text_of(manifest)}
        commit = self.raw_commit(json.dumps({"manifests": [entry]} | self.commit).encode())
        documents = {self.manifest_key: manifest, f"{self.name}/.complete": commit}
        for key, content in (self.data | documents | self.extra).items():
            _put(store, key, content)


def _put(store: Store, key: str, content: bytes, *, tries: int = 4) -> None:
    """Write a document as the sidecar does: again, where a request that came late has replaced it meanwhile."""
    for _ in range(tries - 1):
        with contextlib.suppress(StoreUnavailable):
            store.put(key, content)
            return
    store.put(key, content)


def replacing(old: bytes, new: bytes) -> Raw:
    """Return a change of bytes, which must be there."""

    def change(raw: bytes) -> bytes:
        assert old in raw, (old, raw)
        return raw.replace(old, new)

    return change


def repeated(entries: int, entry: bytes, *, around: tuple[bytes, bytes]) -> bytes:
    """Return a document with the given number of entries, each with its number."""
    return around[0] + b",".join(entry % n for n in range(entries)) + around[1]
