"""S3 and what speaks like it, over boto3: one request per call, no retries of its own, no byte hashed that need not be."""

from __future__ import annotations

import base64
import hashlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from sidecar.core.parts import MIB
from sidecar.errors import AlreadyExists, CorruptObject, NotFound, StoreUnavailable
from sidecar.store.protocol import Capabilities, Part, PendingUpload, Readable, Stored, Verification
from sidecar.store.s3_errors import translated
from sidecar.store.slice import BLOCK_BYTES, FileSlice

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

MIN_PART_BYTES, MAX_PARTS = 5 * MIB, 10_000
"""Source: S3 user guide, "Multipart upload limits"."""
DELETE_BATCH = 1000
SECRET_POLL_S = 5.0
_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


@dataclass(frozen=True, slots=True)
class S3Options:
    """How to reach a bucket. ``None`` leaves it to botocore."""

    bucket: str
    prefix: str
    """Without slashes at its ends; may be empty."""
    endpoint_url: str | None = None
    region: str | None = None
    verify_tls: bool = True
    ca_bundle: Path | None = None
    sse: str | None = None
    sse_kms_key_id: str | None = None
    concurrency: int = 4
    verify: Literal["auto", "md5", "read-back", "off"] = "auto"
    credentials_dir: Path | None = None
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 60.0


class S3Store:
    """Thread-safe. ``probe`` must have been called before anything is uploaded."""

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._root = f"{options.prefix}/" if options.prefix else ""
        self.url = f"s3://{options.bucket}/{options.prefix}".rstrip("/")
        self._lock = threading.Lock()
        self._secrets: tuple[str | None, ...] = ()
        self._looked_s = 0.0
        self._made: S3Client | None = None
        self.verification = Verification.READ_BACK

    @property
    def client(self) -> S3Client:
        """The boto3 client; made anew when a mounted secret was rotated."""
        with self._lock:
            now_s = time.monotonic()
            if self._made is None or (self._options.credentials_dir and now_s - self._looked_s > SECRET_POLL_S):
                self._looked_s = now_s
                secrets = _read_secrets(self._options.credentials_dir)
                if self._made is None or secrets != self._secrets:
                    self._secrets = secrets
                    self._made = _make_client(self._options, secrets)
            return self._made

    def probe(self) -> Capabilities:  # noqa: D102
        from sidecar.store.s3_probe import probe

        capabilities = probe(self, self._options.verify)
        self.verification = capabilities.verification
        return capabilities

    def get(self, key: str) -> bytes:  # noqa: D102
        with self._translated(key):
            return self.client.get_object(Bucket=self._options.bucket, Key=self._root + key)["Body"].read()

    def put(self, key: str, content: bytes, *, only_if_absent: bool = False) -> Stored:  # noqa: D102
        condition: dict[str, Any] = {"IfNoneMatch": "*"} if only_if_absent else {}
        with self._translated(key):
            answer = self.client.put_object(
                Bucket=self._options.bucket,
                Key=self._root + key,
                Body=content,
                **condition,
                **self._encryption(),
                **_md5(content),
            )
        return Stored(key, len(content), _etag(answer["ETag"]))

    def put_with_crc(self, key: str, content: bytes, *, crc64nvme: int) -> None:
        """Write a small object with a checksum, right or wrong: for the probe. Raises botocore's own errors."""
        self.client.put_object(
            Bucket=self._options.bucket,
            Key=self._root + key,
            Body=content,
            ChecksumCRC64NVME=_base64_crc(crc64nvme),
            **self._encryption(),
        )

    def stat(self, key: str) -> Stored:  # noqa: D102
        with self._translated(key):
            answer = self.client.head_object(Bucket=self._options.bucket, Key=self._root + key)
        return Stored(key, answer["ContentLength"], _etag(answer["ETag"]))

    def list(self, prefix: str) -> Iterator[Stored]:  # noqa: D102
        pages = self.client.get_paginator("list_objects_v2")
        with self._translated(prefix or self.url):
            for page in pages.paginate(Bucket=self._options.bucket, Prefix=self._root + prefix):
                for found in page.get("Contents", []):
                    yield Stored(found["Key"].removeprefix(self._root), found["Size"], _etag(found["ETag"]))

    def list_folders(self) -> Iterator[str]:  # noqa: D102
        pages = self.client.get_paginator("list_objects_v2")
        with self._translated(self.url):
            for page in pages.paginate(Bucket=self._options.bucket, Prefix=self._root, Delimiter="/"):
                for found in page.get("CommonPrefixes", []):
                    yield found["Prefix"].removeprefix(self._root).rstrip("/")

    def delete(self, keys: Iterable[str]) -> None:  # noqa: D102
        left = list(keys)
        while left:
            batch, left = left[:DELETE_BATCH], left[DELETE_BATCH:]
            with self._translated(batch[0]):
                answer = self.client.delete_objects(
                    Bucket=self._options.bucket, Delete={"Objects": [{"Key": self._root + key} for key in batch], "Quiet": True}
                )
            failed = [e for e in answer.get("Errors", []) if e.get("Code") != "NoSuchKey"]
            if failed:
                first = failed[0]
                raise StoreUnavailable(f"{first.get('Key')}: not deleted: {first.get('Code')}; it is tried again")

    def put_file(self, key: str, body: FileSlice) -> Stored:  # noqa: D102
        with self._translated(key):
            answer = self.client.put_object(
                Bucket=self._options.bucket,
                Key=self._root + key,
                Body=cast(IO[bytes], body),
                ContentLength=body.size_bytes,
                **self._checksum(body),
                **self._encryption(),
            )
        stored = Stored(key, body.size_bytes, _etag(answer["ETag"]))
        try:
            self._compare_md5(key, body, stored.etag)
        except CorruptObject:
            self.delete([key])
            raise
        return stored

    def begin_upload(self, key: str) -> str:  # noqa: D102
        checksums: dict[str, Any] = {}
        if self.verification is Verification.STORE_CRC:
            checksums = {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"}
        with self._translated(key):
            answer = self.client.create_multipart_upload(
                Bucket=self._options.bucket, Key=self._root + key, **checksums, **self._encryption()
            )
        return answer["UploadId"]

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> Part:  # noqa: D102
        with self._translated(f"{key} part {number}"):
            answer = self.client.upload_part(
                Bucket=self._options.bucket,
                Key=self._root + key,
                UploadId=upload_id,
                PartNumber=number,
                Body=cast(IO[bytes], body),
                ContentLength=body.size_bytes,
                **self._checksum(body),
            )
        self._compare_md5(f"{key} part {number}", body, _etag(answer["ETag"]))
        return Part(number, body.size_bytes, _etag(answer["ETag"]))

    def complete_upload(self, key: str, upload_id: str, parts: Iterable[Part], *, crc64nvme: int) -> Stored:  # noqa: D102
        ordered = sorted(parts, key=lambda part: part.number)
        checksums: dict[str, Any] = {}
        if self.verification is Verification.STORE_CRC:
            checksums = {"ChecksumCRC64NVME": _base64_crc(crc64nvme), "ChecksumType": "FULL_OBJECT"}
        with self._translated(key):
            answer = self.client.complete_multipart_upload(
                Bucket=self._options.bucket,
                Key=self._root + key,
                UploadId=upload_id,
                MultipartUpload={"Parts": [{"PartNumber": p.number, "ETag": f'"{p.etag}"'} for p in ordered]},
                **checksums,
            )
        etag = _etag(answer["ETag"])
        if self.verification is Verification.MD5 and etag != (want := _multipart_etag(ordered)):
            raise CorruptObject(key, want=f"etag {want}", got=f"etag {etag}")
        return Stored(key, sum(part.size_bytes for part in ordered), etag)

    def abort_upload(self, key: str, upload_id: str) -> None:  # noqa: D102
        try:
            with self._translated(key):
                self.client.abort_multipart_upload(Bucket=self._options.bucket, Key=self._root + key, UploadId=upload_id)
        except NotFound:
            return

    def pending_uploads(self, prefix: str) -> Iterator[PendingUpload]:  # noqa: D102
        pages = self.client.get_paginator("list_multipart_uploads")
        with self._translated(prefix or self.url):
            for page in pages.paginate(Bucket=self._options.bucket, Prefix=self._root + prefix):
                for found in page.get("Uploads", []):
                    yield PendingUpload(found["Key"].removeprefix(self._root), found["UploadId"])

    def list_parts(self, key: str, upload_id: str) -> Iterator[Part]:  # noqa: D102
        pages = self.client.get_paginator("list_parts")
        with self._translated(key):
            for page in pages.paginate(Bucket=self._options.bucket, Key=self._root + key, UploadId=upload_id):
                for found in page.get("Parts", []):
                    yield Part(found["PartNumber"], found["Size"], _etag(found["ETag"]))

    @contextmanager
    def read(  # noqa: D102
        self, key: str, *, offset: int = 0, length: int | None = None, etag: str | None = None
    ) -> Iterator[Readable]:
        wanted: dict[str, Any] = {}
        if offset or length is not None:
            wanted["Range"] = f"bytes={offset}-" + ("" if length is None else str(offset + length - 1))
        if etag is not None:
            wanted["IfMatch"] = f'"{etag}"'
        try:
            with self._translated(key):
                answer = self.client.get_object(Bucket=self._options.bucket, Key=self._root + key, **wanted)
        except AlreadyExists:
            raise CorruptObject(key, want=f"etag {etag}", got="another object") from None
        body = answer["Body"]
        try:
            yield _Body(key, body, left=answer["ContentLength"] if length is None else length)
        finally:
            body.close()

    def close(self) -> None:  # noqa: D102
        with self._lock:
            if self._made is not None:
                self._made.close()

    def _translated(self, key: str) -> AbstractContextManager[None]:
        return translated(key if key.startswith("s3://") else f"{self.url}/{key}")

    def _encryption(self) -> dict[str, Any]:
        sse, key_id = self._options.sse, self._options.sse_kms_key_id
        return ({"ServerSideEncryption": sse} if sse else {}) | ({"SSEKMSKeyId": key_id} if key_id else {})

    def _checksum(self, body: FileSlice) -> dict[str, Any]:
        if self.verification is not Verification.STORE_CRC:
            return {}
        while body.read():  # from the page cache; the header must be there before the body
            pass
        header = _base64_crc(body.crc64nvme)
        body.seek(0)
        return {"ChecksumCRC64NVME": header}

    def _compare_md5(self, key: str, body: FileSlice, etag: str) -> None:
        if self.verification is Verification.MD5 and etag != body.md5.hex():
            raise CorruptObject(key, want=f"md5 {body.md5.hex()}", got=f"the store received {etag}")


class _Body:
    """A body that cannot end early without being noticed."""

    def __init__(self, key: str, stream: Any, *, left: int) -> None:
        self._key = key
        self._stream = stream
        self._left = left

    def readinto(self, buffer: memoryview, /) -> int:
        if not self._left:
            return 0
        with translated(self._key):
            try:
                block: bytes = self._stream.read(min(len(buffer), self._left))
            except BotoCoreError:
                raise
            except Exception as error:  # urllib3's, which botocore does not wrap everywhere
                raise StoreUnavailable(f"{self._key}: the answer broke off ({error}); it is tried again") from error
        if not block:
            raise StoreUnavailable(f"{self._key}: the answer ended {self._left} bytes early; it is tried again")
        buffer[: len(block)] = block
        self._left -= len(block)
        return len(block)


def _make_client(options: S3Options, secrets: Sequence[str | None]) -> S3Client:
    config = Config(
        connect_timeout=options.connect_timeout_s,
        read_timeout=options.read_timeout_s,
        retries={"total_max_attempts": 1, "mode": "standard"},  # who calls knows better when and how often
        max_pool_connections=options.concurrency + 4,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        tcp_keepalive=True,
        user_agent_extra="checkpoint-sidecar",
        s3={"payload_signing_enabled": False, "addressing_style": "path" if options.endpoint_url else "auto"},
    )
    key_id, secret, token = secrets if secrets else (None, None, None)
    client: S3Client = boto3.session.Session().client(
        "s3",
        endpoint_url=options.endpoint_url,
        region_name=options.region or ("us-east-1" if options.endpoint_url else None),
        verify=str(options.ca_bundle) if options.verify_tls and options.ca_bundle else options.verify_tls,
        aws_access_key_id=key_id,
        aws_secret_access_key=secret,
        aws_session_token=token,
        config=config,
    )
    _send_in_large_blocks(client)
    return client


def _send_in_large_blocks(client: S3Client) -> None:
    # urllib3 otherwise reads bodies 16 KiB at a time, which costs more CPU than everything else together.
    endpoint = getattr(client, "_endpoint", None)
    manager = getattr(getattr(endpoint, "http_session", None), "_manager", None)
    if manager is not None:
        manager.connection_pool_kw["blocksize"] = BLOCK_BYTES


def _read_secrets(folder: Path | None) -> tuple[str | None, ...]:
    if folder is None:
        return ()
    return tuple((folder / name).read_text().strip() or None if (folder / name).is_file() else None for name in _SECRETS)


def _etag(text: str) -> str:
    return text.strip('"')


def _multipart_etag(parts: Sequence[Part]) -> str:
    """MD5 of the parts' MD5s. Source: how S3, RGW and MinIO name multipart objects."""
    digests = b"".join(bytes.fromhex(part.etag) for part in parts)
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"


def _md5(content: bytes) -> dict[str, Any]:
    return {"ContentMD5": base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()}


def _base64_crc(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(8, "big")).decode()
