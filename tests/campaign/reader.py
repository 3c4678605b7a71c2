"""What is in the store, read by FORMAT.md alone: plain boto3 or plain files, and no code of the sidecar or the hook."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import boto3
from awscrt.checksums import crc64nvme
from botocore.config import Config
from botocore.exceptions import ClientError

Content = tuple[int, str]
"""Size and SHA-256 of a file."""
UNFINISHED = ".ckpt-uploads/"
"""Below a folder store: parts and temporary files, which are not objects."""


def content_of(raw: bytes) -> Content:
    return len(raw), hashlib.sha256(raw).hexdigest()


class Objects(Protocol):
    """A prefix."""

    def list(self, below: str = "") -> dict[str, int]:
        """Return the size of each object, by its key."""

    def get(self, key: str) -> bytes | None:
        """Return the bytes of an object; ``None`` where there is none."""

    def clear(self) -> None:
        """Delete everything."""


class Bucket:
    """Objects of S3."""

    def __init__(self, endpoint: str, bucket: str, prefix: str, *, keys: tuple[str, str]) -> None:
        self._bucket, self._prefix = bucket, f"{prefix}/"
        self._client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id=keys[0],
            aws_secret_access_key=keys[1],
            region_name="us-east-1",
            config=Config(
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                retries={"max_attempts": 8, "mode": "standard"},
                s3={"addressing_style": "path"},
                max_pool_connections=32,
            ),
        )

    def list(self, below: str = "") -> dict[str, int]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix + below)
        found = (entry for page in pages for entry in page.get("Contents", []))
        return {entry["Key"].removeprefix(self._prefix): entry["Size"] for entry in found}

    def get(self, key: str) -> bytes | None:
        try:
            with self._client.get_object(Bucket=self._bucket, Key=self._prefix + key)["Body"] as body:
                raw: bytes = body.read()
                return raw
        except ClientError as error:
            if error.response["Error"]["Code"] in ("NoSuchKey", "404"):
                return None
            raise

    def clear(self) -> None:
        for key in self.list():
            self._client.delete_object(Bucket=self._bucket, Key=self._prefix + key)


class Folder:
    """Objects of a folder store."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def list(self, below: str = "") -> dict[str, int]:
        found: dict[str, int] = {}
        for folder, _, names in os.walk(self._root):  # which passes over a folder that is removed meanwhile
            for path in (Path(folder, name) for name in names):
                key = path.relative_to(self._root).as_posix()
                if key.startswith(below) and not key.startswith(UNFINISHED):
                    with contextlib.suppress(FileNotFoundError):
                        found[key] = path.stat().st_size
        return found

    def get(self, key: str) -> bytes | None:
        try:
            return (self._root / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def clear(self) -> None:
        """It goes with the run's folder."""


@dataclass
class Commit:
    """A committed checkpoint, and what is wrong with it."""

    name: str
    step: int = -1
    attempt: str = ""
    keys: dict[str, str] = field(default_factory=dict)
    """All keys that it names, with their checksums."""
    nodes: dict[int, dict[str, Content]] = field(default_factory=dict)
    """The files of each node, as they are in the store."""
    meta: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    size_bytes: int = 0
    raw: bytes = b""

    @property
    def is_whole(self) -> bool:
        return not self.problems


class Reader:
    """Reads checkpoints in the order of I5: commit, manifests, data, each verified against what named it."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.verified_bytes = 0

    def names(self) -> list[str]:
        """Return the names of committed checkpoints, the newest step last; ``final`` first."""
        found = [key.removesuffix("/.complete") for key in self.objects.list() if key.endswith("/.complete")]
        return sorted((name for name in found if "/" not in name), key=step_of)

    def commit(self, name: str) -> Commit | None:
        """Return a commit, read whole; ``None`` where there is none, or where it changed meanwhile again and again."""
        for _ in range(5):
            raw = self.objects.get(f"{name}/.complete")
            if raw is None:
                return None
            found = self._read(name, raw)
            if self.objects.get(f"{name}/.complete") == raw:
                return found
        return None

    def newest_whole(self) -> Commit | None:
        """Return the newest step that passes."""
        for name in reversed(self.names()):
            found = self.commit(name)
            if name != "final" and found is not None and found.is_whole:
                return found
        return None

    def quarantined(self, commit: Commit) -> bool:
        return f"{commit.name}/.ckpt/quarantined-{_hex(crc64nvme(commit.raw))}.json" in self.objects.list(commit.name + "/")

    def _read(self, name: str, raw: bytes) -> Commit:
        found = Commit(name, raw=raw)
        try:
            document = json.loads(raw)
            found.step, found.attempt, found.meta = document["step"], document["attempt"], document.get("meta", {})
            if document["name"] != name or document["format"] != 1 or (name != "final" and step_of(name) != found.step):
                found.problems.append(f"its commit says {document['name']}, step {document['step']}")
            for entry in document["manifests"]:
                self._read_manifest(found, entry)
            totals = [content for files in found.nodes.values() for content in files.values()]
            if not found.problems and not _fits(document, found, totals):
                found.problems.append(f"{document['files']} files of {document['size_bytes']} bytes, and it has others")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            found.problems.append(f"a document cannot be read: {error!r}")
        return found

    def _read_manifest(self, found: Commit, entry: Mapping[str, Any]) -> None:
        raw = self._verified(found, entry["key"], entry["size_bytes"], entry["crc64nvme"])
        if raw is None:
            return
        document = json.loads(raw)
        if (document["name"], document["attempt"]) != (found.name, found.attempt):
            found.problems.append(f"{entry['key']}: of {document['name']}, attempt {document['attempt']}")
        files = found.nodes.setdefault(document["node"]["index"], {})
        for file in document["files"]:
            content = self._verified(found, file["key"], file["size_bytes"], file["crc64nvme"])
            if content is not None:
                files[file["path"]] = content_of(content)

    def _verified(self, found: Commit, below: str, size_bytes: int, crc: str) -> bytes | None:
        key = below if below.startswith(f"{found.name}/") else f"{found.name}/{below}"
        found.keys[key] = crc
        raw = self.objects.get(key)
        if raw is None:
            found.problems.append(f"{key}: missing")
            return None
        self.verified_bytes += len(raw)
        found.size_bytes += len(raw)
        if (len(raw), _hex(crc64nvme(raw))) != (size_bytes, crc):
            found.problems.append(f"{key}: {len(raw)} bytes of {_hex(crc64nvme(raw))}; {size_bytes} of {crc} are recorded")
            return None
        return raw


def _fits(document: Mapping[str, Any], found: Commit, totals: list[Content]) -> bool:
    """Files that several nodes have in common count once or for each: FORMAT.md says totals."""
    once = {(path, content) for files in found.nodes.values() for path, content in files.items()}
    counts = {(len(totals), sum(size for size, _ in totals)), (len(once), sum(size for _, (size, _) in once))}
    return (document["files"], document["size_bytes"]) in counts


def step_of(name: str) -> int:
    """Return the step of a name; -1 for ``final``."""
    return int(name.removeprefix("checkpoint-")) if name.startswith("checkpoint-") else -1


def _hex(crc: int) -> str:
    return f"{crc:016x}"
