"""Independent reader of the store, after FORMAT.md alone: no code of the sidecar judges what the sidecar wrote."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_POLYNOMIAL = 0x9A6C9329AC4BC9B5
"""CRC-64/NVME, reflected."""


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()


@functools.lru_cache(8192)
def crc64nvme(content: bytes) -> str:
    """Return the checksum as documents have it: 16 hexadecimal digits."""
    crc = 0xFFFFFFFFFFFFFFFF
    for byte in content:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return f"{crc ^ 0xFFFFFFFFFFFFFFFF:016x}"


@functools.lru_cache(1024)
def _document(content: bytes) -> dict[str, object]:
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Whole:
    """A committed step whose every byte is what its documents say."""

    name: str
    attempt: str
    save_id: str | None
    files: Mapping[int, Mapping[str, bytes]]
    """Content by node and path."""


@dataclass(frozen=True)
class Named:
    """What a commit names."""

    attempt: str
    save_id: str | None
    created_at: str | None
    manifests: Mapping[str, str]
    """Checksum of each manifest, by key."""
    files: Mapping[str, str]
    """Checksum of each object, by key: of those manifests that are there."""
    epoch: int | None = None
    """Of the prefix, when it was written; ``None``: not known."""


def commit_key(name: str) -> str:
    return f"{name}/.complete"


def committed(objects: Mapping[str, bytes]) -> list[str]:
    """Return the names of all committed steps, newest first."""
    names = [key.removesuffix("/.complete") for key in objects if key.endswith("/.complete")]
    return sorted((n for n in names if n.startswith("checkpoint-")), key=step_of, reverse=True)


def step_of(name: str) -> int:
    return int(name.rpartition("-")[2])


def named(objects: Mapping[str, bytes], name: str) -> Named | None:
    """Return what the commit of a step names; ``None``: it is not committed."""
    raw = objects.get(commit_key(name))
    if raw is None:
        return None
    return _named(raw, tuple(objects.get(key, b"") for key in _manifest_keys(raw)))


@functools.lru_cache(512)
def _manifest_keys(raw: bytes) -> tuple[str, ...]:
    return tuple(entry["key"] for entry in _document(raw).get("manifests", ()))  # type: ignore[attr-defined]


@functools.lru_cache(512)
def _named(raw: bytes, manifests: tuple[bytes, ...]) -> Named:
    commit = _document(raw)
    files = {}
    for manifest in manifests:
        for file in _document(manifest).get("files", ()):  # type: ignore[attr-defined]
            files[file["key"]] = file["crc64nvme"]
    crcs = {entry["key"]: entry["crc64nvme"] for entry in commit["manifests"]}  # type: ignore[attr-defined]
    return Named(str(commit["attempt"]), commit.get("save_id"), commit.get("created_at"), crcs, files, commit.get("epoch"))  # type: ignore[arg-type]


def whole(objects: Mapping[str, bytes], name: str) -> Whole | None:
    """Return a step as a resume must find it, or ``None`` if it must pass it over. Quarantine counts."""
    raw = objects.get(commit_key(name))
    if raw is None or f"{name}/.ckpt/quarantined-{crc64nvme(raw)}.json" in objects:
        return None
    commit = _document(raw)
    files: dict[int, dict[str, bytes]] = {}
    for entry in commit.get("manifests", ()):  # type: ignore[attr-defined]
        document = objects.get(entry["key"])
        if document is None or crc64nvme(document) != entry["crc64nvme"] or len(document) != entry["size_bytes"]:
            return None
        manifest = _document(document)
        part = files.setdefault(int(manifest["node"]["index"]), {})  # type: ignore[index]
        for file in manifest["files"]:  # type: ignore[attr-defined]
            content = objects.get(file["key"])
            if content is None or len(content) != file["size_bytes"] or crc64nvme(content) != file["crc64nvme"]:
                return None
            part[file["path"]] = content
    return Whole(name, str(commit["attempt"]), commit.get("save_id"), files)  # type: ignore[arg-type]


def for_node(index: int, parts: Mapping[int, Mapping[str, bytes]]) -> dict[str, bytes]:
    """Return the files that a node gets: all, and of one path that several have its own, else that of the lowest index (I6)."""
    files: dict[str, bytes] = {}
    for number in sorted(parts, reverse=True):
        files.update(parts[number])
    return files | dict(parts.get(index, {}))


def newest_whole(objects: Mapping[str, bytes], but: Iterable[str] = ()) -> Whole | None:
    """Return what ``latest`` means now."""
    for name in committed(objects):
        if name not in but and (found := whole(objects, name)) is not None:
            return found
    return None
