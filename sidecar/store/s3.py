"""S3 and what speaks like it: one request per call, retried by the caller, no byte hashed that need not be."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError

from sidecar.core import checksum
from sidecar.errors import AccessRefused, AlreadyExists, CorruptObject, NotFound, StoreError, StoreUnavailable
from sidecar.store.protocol import Capabilities, Part, PendingUpload, Readable, Stored, Verification
from sidecar.store.s3_bodies import Bodies, Incoming, conditions, range_bytes
from sidecar.store.s3_client import Clients, S3Options
from sidecar.store.s3_errors import refused_deletion, translated
from sidecar.store.s3_listing import Page, pages
from sidecar.store.s3_multipart import Multipart
from sidecar.store.s3_probe import probe
from sidecar.store.s3_signing import UNSIGNED
from sidecar.store.slice import FileSlice
from sidecar.store.wire_answer import OpenAnswer

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

__all__ = ["S3Options", "S3Store"]

SSE_HEADER = "x-amz-server-side-encryption"
CHECKSUM_HEADER = "x-amz-checksum"
CRC_HEADER = f"{CHECKSUM_HEADER}-crc64nvme"
COPYING = TransferConfig(multipart_threshold=5 << 30, multipart_chunksize=512 << 20, max_concurrency=4)
"""Source: S3 API reference, "CopyObject": up to 5 GiB in one request."""
DELETE_BATCH = 1000
"""Source: S3 API reference, "DeleteObjects"."""


class S3Store:
    """Thread-safe. ``probe`` must have been called before anything is uploaded."""

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._root = f"{options.prefix}/" if options.prefix else ""
        self.url = f"s3://{options.bucket}/{options.prefix}".rstrip("/")
        self._clients = Clients(options)
        self._bodies = Bodies(self._clients.current)
        self._multipart = Multipart(self._bodies)
        self.verification = Verification.READ_BACK
        self._takes_conditions = True
        self.crc_with_parts = False

    @property
    def client(self) -> S3Client:
        """The boto3 client for the next request."""
        return self._clients.current().client

    def probe(self) -> Capabilities:  # noqa: D102
        self._takes_conditions = True
        capabilities = self._probe_both_addresses()
        self.verification, self._takes_conditions = capabilities.verification, capabilities.conditional_put
        return capabilities

    def _probe_both_addresses(self) -> Capabilities:
        try:
            return probe(self, self._options.verify)
        except AccessRefused as refused:
            if not self._options.endpoint_url:
                raise
            # Most servers want the bucket in the path; some take it in the host alone.
            self._clients.address_by("virtual")
            try:
                return probe(self, self._options.verify)
            except StoreError:
                self._clients.address_by("path")
                raise refused from None

    def get(self, key: str) -> bytes:  # noqa: D102
        with self._translated(key):
            return self._bodies.read(self._root + key, operation="GetObject")

    def put(self, key: str, content: bytes, *, only_if_absent: bool = False) -> Stored:  # noqa: D102
        condition = {"If-None-Match": "*"} if only_if_absent and self._takes_conditions else {}
        if only_if_absent and not condition and self._exists(key):
            raise AlreadyExists(key)
        headers = condition | self._encryption_headers() | self._checksums_of(content)
        try:
            with self._translated(key):
                etag = self._bodies.put_document(self._root + key, content, headers=headers)
        except AlreadyExists:  # perhaps by ourselves: a try before this one succeeded, and its answer was lost
            if self.get(key) != content:
                raise
            return self.stat(key)
        stored = Stored(key, len(content), _etag(etag))
        if not self._is_what_was_sent(stored, content):
            self.delete([key])
            raise CorruptObject(key, want="what was sent", got="the store received something else")
        return stored

    def _exists(self, key: str) -> bool:
        try:
            self.stat(key)
        except NotFound:
            return False
        return True

    def _checksums_of(self, content: bytes) -> dict[str, str]:
        """Return what a store compares a small object with: its MD5, which all take, and the CRC where it was seen to look."""
        md5 = {"Content-MD5": base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()}
        crc = {CRC_HEADER: _base64_crc(checksum.checksum(content))}
        return md5 | (crc if self.verification is Verification.STORE_CRC else {})

    def _is_what_was_sent(self, stored: Stored, content: bytes) -> bool:
        if self.verification is Verification.MD5:
            return stored.etag == hashlib.md5(content, usedforsecurity=False).hexdigest()
        return self.verification is not Verification.READ_BACK or self.get(stored.key) == content

    def put_with_crc(self, key: str, content: bytes, *, crc64nvme: int) -> None:  # noqa: D102
        headers = self._encryption_headers() | {CRC_HEADER: _base64_crc(crc64nvme)}
        with self._translated(key):
            self._bodies.put_document(self._root + key, content, headers=headers)

    def stat(self, key: str) -> Stored:  # noqa: D102
        with self._translated(key):
            answer = self.client.head_object(Bucket=self._options.bucket, Key=self._root + key)
        return Stored(key, answer["ContentLength"], _etag(answer["ETag"]))

    def list(self, prefix: str) -> Iterator[Stored]:  # noqa: D102
        for page in self._pages(prefix):
            for found in page.objects:
                if key := found.key.removeprefix(self._root):  # consoles create an object for the prefix itself
                    yield replace(found, key=key)

    def list_folders(self) -> Iterator[str]:  # noqa: D102
        for page in self._pages("", delimiter="/"):
            for prefix in page.prefixes:
                yield prefix.removeprefix(self._root).rstrip("/")

    def _pages(self, prefix: str, *, delimiter: str = "") -> Iterator[Page]:
        def ask(query: dict[str, str]) -> bytes:
            return self._bodies.read(operation="ListObjectsV2", query=query)

        with self._translated(prefix or self.url):
            yield from pages(ask, prefix=self._root + prefix, delimiter=delimiter)

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
                raise refused_deletion(self.url, [(e.get("Key", ""), e.get("Code", "")) for e in failed])

    def put_file(self, key: str, body: FileSlice) -> Stored:  # noqa: D102
        with self.putting_file(key, body) as answered:
            return answered()

    @contextmanager
    def putting_file(self, key: str, body: FileSlice) -> Iterator[Callable[[], Stored]]:  # noqa: D102
        with ExitStack() as sent:
            with self._translated(key):
                headers = self._encryption_headers() | self._crc_header(body, whole=True)
                putting = self._bodies.putting(
                    self._root + key, body, operation="PutObject", headers=headers, sha256=self._signed_hash(body)
                )
                answered = sent.enter_context(putting)
            yield lambda: self._put(key, body, answered)

    def _put(self, key: str, body: FileSlice, answered: Callable[[], str]) -> Stored:
        with self._translated(key):
            stored = Stored(key, body.size_bytes, _etag(answered()))
        try:
            self._compare_md5(key, body, stored.etag)
        except CorruptObject:
            self.delete([key])
            raise
        return stored

    def copy(self, source: str, target: str, *, etag: str) -> Stored:  # noqa: D102
        there = self.stat(source)
        if there.etag != etag:
            raise CorruptObject(source, want=f"etag {etag}", got=f"etag {there.etag}")
        origin: Any = {"Bucket": self._options.bucket, "Key": self._root + source}
        with self._translated(target):
            try:
                # Managed: beyond 5 GiB a copy is made in parts.
                self.client.copy(
                    origin,
                    self._options.bucket,
                    self._root + target,
                    ExtraArgs={"CopySourceIfMatch": f'"{etag}"', **self._encryption()},
                    Config=COPYING,
                )
            except ClientError as error:
                if error.response.get("Error", {}).get("Code") in ("PreconditionFailed", "412"):
                    raise CorruptObject(source, want=f"etag {etag}", got="the object was replaced") from None
                raise
        return self.stat(target)

    def begin_upload(self, key: str) -> str:  # noqa: D102
        checksums = {}
        if self.verification is Verification.STORE_CRC:
            checksums = {f"{CHECKSUM_HEADER}-algorithm": "CRC64NVME", f"{CHECKSUM_HEADER}-type": "FULL_OBJECT"}
        with self._translated(key):
            return self._multipart.begin(self._root + key, headers=checksums | self._encryption_headers())

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> Part:  # noqa: D102
        with self._translated(f"{key} part {number}"):
            putting = self._bodies.putting(
                self._root + key,
                body,
                operation="UploadPart",
                query={"partNumber": number, "uploadId": upload_id},
                headers=self._crc_header(body, whole=False),
                sha256=self._signed_hash(body),
            )
            with putting as answered:
                etag = answered()
        self._compare_md5(f"{key} part {number}", body, _etag(etag))
        return Part(number, body.size_bytes, _etag(etag))

    def complete_upload(self, key: str, upload_id: str, parts: Iterable[Part], *, crc64nvme: int) -> Stored:  # noqa: D102
        ordered = sorted(parts, key=lambda part: part.number)
        checksums = {}
        if self.verification is Verification.STORE_CRC:
            checksums = {CRC_HEADER: _base64_crc(crc64nvme), f"{CHECKSUM_HEADER}-type": "FULL_OBJECT"}
        try:
            with self._translated(key):
                etag = self._multipart.complete(self._root + key, upload_id, ordered, headers=checksums)
        except NotFound:
            return self._completed_before(key, ordered)
        except StoreUnavailable:  # what Ceph RGW 16 says of an upload that is not there any more
            if self._is_pending(key, upload_id):
                raise
            return self._completed_before(key, ordered)
        stored = Stored(key, _total_bytes(ordered), _etag(etag))
        if not stored.etag:  # Ceph RGW 16 leaves it out
            stored = self.stat(key)
        if self.verification is Verification.MD5 and stored.etag != (want := _multipart_etag(ordered)):
            self.delete([key])
            raise CorruptObject(key, want=f"etag {want}", got=f"etag {stored.etag}")
        return stored

    def _is_pending(self, key: str, upload_id: str) -> bool:
        try:
            next(iter(self.list_parts(key, upload_id)), None)
        except NotFound:
            return False
        return True

    def _completed_before(self, key: str, parts: Sequence[Part]) -> Stored:
        """Return the object if it is made of these parts: an earlier try succeeded and its answer was lost on the way."""
        there = self.stat(key)
        if there.size_bytes != _total_bytes(parts) or there.etag != _multipart_etag(parts):
            raise NotFound(f"{self.url}/{key} (unfinished upload)")
        return there

    def abort_upload(self, key: str, upload_id: str) -> None:  # noqa: D102
        try:
            with self._translated(key):
                self._multipart.abort(self._root + key, upload_id)
        except NotFound:
            return

    def pending_uploads(self, prefix: str) -> Iterator[PendingUpload]:  # noqa: D102
        with self._translated(prefix or self.url):
            for found in self._multipart.pending(self._root + prefix):
                yield replace(found, key=found.key.removeprefix(self._root))

    def list_parts(self, key: str, upload_id: str) -> Iterator[Part]:  # noqa: D102
        with self._translated(key):
            yield from self._multipart.parts(self._root + key, upload_id)

    @contextmanager
    def read(  # noqa: D102
        self, key: str, *, offset: int = 0, length: int | None = None, etag: str | None = None
    ) -> Iterator[Readable]:
        if (length == 0 or (length is None and offset)) and self._ends_at(key, offset, length, etag):
            yield io.BytesIO()
            return
        with self._asked(key, offset, length, etag) as answered:
            yield answered()

    @contextmanager
    def reading(self, key: str, *, length: int) -> Iterator[Callable[[], Readable]]:  # noqa: D102
        if length:
            with self._asked(key, 0, length, None) as answered:
                yield answered
        else:
            with self.read(key, length=0) as body:
                yield lambda: body

    @contextmanager
    def _asked(self, key: str, offset: int, length: int | None, etag: str | None) -> Iterator[Callable[[], Readable]]:
        with ExitStack() as asked:
            with self._translated(key):
                answered = asked.enter_context(self._bodies.getting(self._root + key, conditions(offset, length, etag)))
            yield lambda: self._opened(key, answered, offset, length, etag)

    def _opened(
        self, key: str, answered: Callable[[], OpenAnswer], offset: int, length: int | None, etag: str | None
    ) -> Readable:
        try:
            with self._translated(key):
                answer = answered()
        except AlreadyExists:  # the precondition failed
            raise CorruptObject(key, want=f"etag {etag}", got="the object was replaced") from None
        there = range_bytes(key, answer, offset, ranged=bool(offset) or length is not None)
        if length is not None and there < length:
            raise CorruptObject(key, want=f"at least {offset + length} bytes", got=f"{offset + there} bytes")
        return Incoming(f"{self.url}/{key}", answer, left=there if length is None else length)

    def _ends_at(self, key: str, offset: int, length: int | None, etag: str | None) -> bool:
        """Whether nothing is asked for. No range can say so: it would be refused, or answered with the whole object."""
        there = self.stat(key)
        if etag is not None and there.etag != etag:
            raise CorruptObject(key, want=f"etag {etag}", got=f"etag {there.etag}")
        if there.size_bytes < offset:
            raise CorruptObject(key, want=f"at least {offset} bytes", got=f"{there.size_bytes} bytes")
        return length == 0 or there.size_bytes == offset

    def close(self) -> None:  # noqa: D102
        self._clients.close()

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        try:
            with translated(key if key.startswith("s3://") else f"{self.url}/{key}"):
                yield
        except AccessRefused:
            self._clients.forget()
            raise

    def _encryption(self) -> dict[str, Any]:
        sse, key_id = self._options.sse, self._options.sse_kms_key_id
        return ({"ServerSideEncryption": sse} if sse else {}) | ({"SSEKMSKeyId": key_id} if key_id else {})

    def _encryption_headers(self) -> dict[str, str]:
        names = {"ServerSideEncryption": SSE_HEADER, "SSEKMSKeyId": f"{SSE_HEADER}-aws-kms-key-id"}
        return {names[name]: value for name, value in self._encryption().items()}

    def _crc_header(self, body: FileSlice, *, whole: bool) -> dict[str, str]:
        if self.verification is not Verification.STORE_CRC or not (whole or self.crc_with_parts):
            return {}
        return {CRC_HEADER: _base64_crc(body.crc64nvme_ahead())}

    def _signed_hash(self, body: FileSlice) -> str:
        return body.sha256_ahead() if self.verification is Verification.SIGNED_SHA256 else UNSIGNED

    def _compare_md5(self, key: str, body: FileSlice, etag: str) -> None:
        if self.verification is Verification.MD5 and etag != body.md5.hex():
            raise CorruptObject(key, want=f"md5 {body.md5.hex()}", got=f"the store received {etag}")


def _etag(text: str) -> str:
    return text.strip('"')


def _total_bytes(parts: Sequence[Part]) -> int:
    return sum(part.size_bytes for part in parts)


def _multipart_etag(parts: Sequence[Part]) -> str:
    """MD5 of the parts' MD5s, as S3, RGW and MinIO name multipart objects; empty where etags are something else."""
    try:
        digests = b"".join(bytes.fromhex(part.etag) for part in parts)
    except ValueError:
        return ""
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"


def _base64_crc(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(8, "big")).decode()
