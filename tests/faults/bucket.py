"""The store behind the proxy, looked at directly and with nothing of the sidecar's own code."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import uuid
from collections.abc import Mapping
from typing import Any

import boto3
from awscrt.checksums import crc64nvme
from botocore.config import Config

from tests import servers

NAME = "faults"
MIB = 1 << 20


@functools.cache
def random_bytes(size_bytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


@functools.cache
def checkpoint_files() -> Mapping[str, bytes]:
    """One file of three parts and thirty small ones."""
    sizes = random.Random(1)
    small = {f"small/{n:02}.bin": random_bytes(sizes.randrange(1, 50_000), n) for n in range(30)}
    return {"model.safetensors": random_bytes(40 * MIB, 1)} | small


def to_text(crc: int) -> str:
    return f"{crc:016x}"


class Bucket:
    """A run of its own on an S3 server."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.prefix = f"run-{uuid.uuid4().hex[:8]}"
        self._client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id=servers.ACCESS_KEY,
            aws_secret_access_key=servers.SECRET_KEY,
            region_name=servers.REGION,
            config=Config(request_checksum_calculation="when_required", response_checksum_validation="when_required"),
        )
        with contextlib.suppress(self._client.exceptions.BucketAlreadyOwnedByYou):
            self._client.create_bucket(Bucket=NAME)

    def close(self) -> None:
        self._client.close()

    def settings(self, endpoint: str | None = None) -> dict[str, str]:
        """Return what a sidecar needs to use it through ``endpoint``, or directly."""
        return {
            "CKPT_STORE": f"s3://{NAME}/{self.prefix}",
            "AWS_S3_ENDPOINT": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": servers.ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": servers.SECRET_KEY,
            "AWS_DEFAULT_REGION": servers.REGION,
        }

    def get(self, key: str) -> bytes:
        with self._client.get_object(Bucket=NAME, Key=f"{self.prefix}/{key}")["Body"] as body:
            return body.read()

    def put(self, key: str, content: bytes) -> None:
        self._client.put_object(Bucket=NAME, Key=f"{self.prefix}/{key}", Body=content)

    def keys(self) -> list[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=NAME, Prefix=f"{self.prefix}/")
        return [found["Key"].removeprefix(f"{self.prefix}/") for page in pages for found in page.get("Contents", [])]

    def is_committed(self, name: str) -> bool:
        return f"{name}/.complete" in self.keys()

    def unfinished_uploads(self) -> list[str]:
        pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=NAME, Prefix=f"{self.prefix}/")
        return [found["Key"] for page in pages for found in page.get("Uploads", [])]

    def abort_unfinished_uploads(self) -> int:
        """Do what the start of another sidecar does, and return how many there were."""
        pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=NAME, Prefix=f"{self.prefix}/")
        found = [upload for page in pages for upload in page.get("Uploads", [])]
        for upload in found:
            self._client.abort_multipart_upload(Bucket=NAME, Key=upload["Key"], UploadId=upload["UploadId"])
        return len(found)

    def manifest(self, name: str) -> dict[str, Any]:
        """Return the manifest that the commit of a lone node's checkpoint names, which must be what it says."""
        [named] = json.loads(self.get(f"{name}/.complete"))["manifests"]
        raw = self.get(named["key"])
        assert (named["size_bytes"], named["crc64nvme"]) == (len(raw), to_text(crc64nvme(raw)))
        return json.loads(raw)

    def assert_holds(self, name: str, files: Mapping[str, bytes]) -> None:
        """A checkpoint is committed, and every object and every recorded checksum is that of its source."""
        entries = {entry["path"]: entry for entry in self.manifest(name)["files"]}
        assert entries.keys() == files.keys()
        for path, content in files.items():
            assert self.get(entries[path]["key"]) == content, f"{path} differs in the store"
            assert entries[path]["size_bytes"] == len(content)
            assert entries[path]["crc64nvme"] == to_text(crc64nvme(content)), path
