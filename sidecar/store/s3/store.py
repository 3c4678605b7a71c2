"""Store on S3 and compatible servers: small requests by the control plane, bodies of files by the data plane.

One request per call, retried by the caller; only the checksums needed are computed.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

from sidecar.core.format import checksum
from sidecar.core.format.key_limits import KeyLimits
from sidecar.core.format.manifest import MAX_DOCUMENT_BYTES
from sidecar.errors import (
    AccessRefused,
    AlreadyExists,
    CorruptObject,
    NotFound,
    OversizedDocument,
    StoreError,
    StoreUnavailable,
)
from sidecar.store.protocol import Capabilities, Part, PendingUpload, Readable, Stored, Verification
from sidecar.store.s3.answers import plain_etag
from sidecar.store.s3.client import Clients, S3Options
from sidecar.store.s3.control import Control, Page, base64_crc, multipart_etag
from sidecar.store.s3.errors import refused_deletion
from sidecar.store.s3.probe import probe
from sidecar.store.s3.reads import Reads, same_object
from sidecar.store.s3.signing import UNSIGNED
from sidecar.store.slice import FileSlice

P = ParamSpec("P")
T = TypeVar("T")

__all__ = ["S3Options", "S3Store"]

SSE_HEADER = "x-amz-server-side-encryption"
ACL_HEADER = "x-amz-acl"
CRC_HEADER = "x-amz-checksum-crc64nvme"
DELETE_BATCH = 1000
"""Source: S3 API reference, "DeleteObjects"."""
REMOVAL_TRIES = 3
"""Tries to delete a document that was damaged on its way."""
JOINING_S = (0.1, 0.2, 0.4, 0.8, 1.5)
"""Pauses in seconds between lookups of the object whose upload the store no longer knows."""

_MD5 = re.compile(r"[0-9a-f]{32}(?:-[0-9]{1,5})?")


class S3Store:
    """Thread-safe. Call ``probe`` before the first upload."""

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._root = f"{options.prefix}/" if options.prefix else ""
        self.key_limits = KeyLimits(prefix_bytes=len(self._root.encode()))
        self.url = f"s3://{options.bucket}/{options.prefix}".rstrip("/")
        self._clients = Clients(options)
        self._reads = Reads(self._clients, self.stat, root=self._root, url=self.url)
        self.verification = Verification.READ_BACK
        self._takes_conditions = True
        self._etags_are_md5 = False
        """Whether an etag was the MD5 of its document. Those of encrypted documents are not."""
        self.crc_with_parts = False
        self.md5_with_bodies = True

    def probe(self) -> Capabilities:  # noqa: D102
        self._takes_conditions = True
        capabilities = self._probe_both_addresses()
        with self._clients.translated(self.url):
            endpoint = self._clients.current().client.meta.endpoint_url  # of the settings, or of a profile
        self.verification, self._takes_conditions = capabilities.verification, capabilities.conditional_put
        return replace(capabilities, is_encrypted=endpoint.startswith("https:"))

    def _probe_both_addresses(self) -> Capabilities:
        try:
            return probe(self, self._options.verify)
        except AccessRefused as refused:
            if not self._options.endpoint_url:
                raise
            # Most servers take path-style addresses; some take virtual-hosted ones alone.
            self._clients.address_by("virtual")
            try:
                return probe(self, self._options.verify)
            except StoreError:
                self._clients.address_by("path")
                raise refused from None

    def get(self, key: str, *, most_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:  # noqa: D102
        content, etag = self._get(key, most_bytes)
        if self._note_md5(content, etag) or not self._etags_are_md5:
            return content
        # It was damaged on the way, or it is encrypted, unlike others here: then it is the same twice.
        if self._get(key, most_bytes) != (content, etag):
            raise StoreUnavailable(f"{self.url}/{key}: two answers differ; it is tried again")
        return content

    def _get(self, key: str, most_bytes: int) -> tuple[bytes, str]:
        """Return a document as the store sent it, and its etag."""
        answer = self._ask(key, Control.get, self._root + key, most_bytes=most_bytes)
        etag = "" if answer is None else plain_etag(answer.headers.get("etag", ""))
        if answer is not None and answer.says_where_it_ends and self._is_of_store(answer.content, etag):
            return answer.content, etag
        there = self.stat(key)  # by a listing, whose truncation is detected
        size_bytes = there.size_bytes
        if size_bytes > most_bytes:
            raise OversizedDocument(f"{self.url}/{key}", most_bytes=most_bytes, size_bytes=size_bytes)
        if answer is None or len(answer.content) != size_bytes:
            raise StoreUnavailable(f"{self.url}/{key}: the answer has not the {size_bytes} bytes listed; it is tried again")
        if there.etag != etag:
            raise StoreUnavailable(f"{self.url}/{key}: the answer has not the etag {there.etag} listed; it is tried again")
        return answer.content, etag

    def _is_of_store(self, content: bytes, etag: str) -> bool:
        """Whether a document's etag proves that the store sent it.

        Other servers send etags, too. The store's is the MD5 of the content, or looks like one where the content is encrypted.
        """
        if self._note_md5(content, etag):
            return True
        return self.verification is not Verification.MD5 and _MD5.fullmatch(etag) is not None

    def _note_md5(self, content: bytes, etag: str) -> bool:
        """Return whether an etag is the MD5 of its document, and take note that this store's etags are."""
        is_md5 = etag == hashlib.md5(content, usedforsecurity=False).hexdigest()
        self._etags_are_md5 |= is_md5
        return is_md5

    def put(self, key: str, content: bytes, *, only_if_absent: bool = False) -> Stored:  # noqa: D102
        condition = only_if_absent and self._takes_conditions
        if only_if_absent and not condition and self._exists(key):
            raise AlreadyExists(key)
        crc = checksum.checksum(content) if self.verification is Verification.STORE_CRC else None
        try:
            etag = self._ask(key, Control.put, self._root + key, content, only_if_absent=condition, crc64nvme=crc)
        except AlreadyExists:  # perhaps our own object: an earlier try succeeded, and its answer was lost
            if not self._holds(key, content):
                raise
            return self.stat(key)
        stored = Stored(key, len(content), plain_etag(etag))
        self._note_md5(content, stored.etag)
        if self._is_what_was_sent(stored, content):
            return stored
        if self._remove_damaged(stored):
            raise CorruptObject(key, want="what was sent", got="the store received something else")
        if only_if_absent:
            raise AlreadyExists(key)
        return stored  # another writer replaced it meanwhile

    def _remove_damaged(self, written: Stored) -> bool:
        """Delete the object that we wrote, unless another writer has replaced it.

        Returns:
            Whether no other writer's object is there. Without etags in the store this is unknown, and the object stays.
        """
        if not written.etag:
            return True
        for _ in range(REMOVAL_TRIES):
            there = next((found.etag for found in self.list(written.key) if found.key == written.key), None)
            if there != written.etag:
                return there is None
            self.delete([written.key])
        return True

    def _exists(self, key: str) -> bool:
        return self._ask(key, Control.find, self._root + key) is not None

    def _holds(self, key: str, content: bytes) -> bool:
        try:
            return self.get(key, most_bytes=len(content)) == content
        except (NotFound, OversizedDocument):
            return False

    def _is_what_was_sent(self, stored: Stored, content: bytes) -> bool:
        if self.verification is Verification.MD5:
            return self._note_md5(content, stored.etag)
        return self.verification is not Verification.READ_BACK or self._holds(stored.key, content)

    def put_with_crc(self, key: str, content: bytes, *, crc64nvme: int) -> None:  # noqa: D102
        self._ask(key, Control.put, self._root + key, content, only_if_absent=False, crc64nvme=crc64nvme)

    def takes(self, key: str, content: bytes, options: Mapping[str, str]) -> bool:  # noqa: D102
        other = S3Store(replace(self._options, **options))  # type: ignore[arg-type]
        try:
            other.put(key, content)
        except StoreError:
            return False
        finally:
            other.close()
        return True

    def stat(self, key: str) -> Stored:  # noqa: D102
        found = self._ask(key, Control.find, self._root + key)
        if found is None:
            raise NotFound(f"{self.url}/{key}")
        return replace(found, key=key)

    def list(self, prefix: str) -> Iterator[Stored]:  # noqa: D102
        for page in self._pages(prefix):
            for found in page.objects:
                if key := found.key.removeprefix(self._root):  # consoles create an object for the prefix itself
                    yield replace(found, key=key)

    def list_folders(self, prefix: str = "") -> Iterator[str]:  # noqa: D102
        for page in self._pages(prefix, delimiter="/"):
            for folder in page.prefixes:
                yield folder.removeprefix(self._root + prefix).rstrip("/")

    def _pages(self, prefix: str, *, delimiter: str = "") -> Iterator[Page]:
        with self._translated(prefix.rpartition("/")[0] or self.url):
            yield from self._clients.pages(Control.pages, self._root + prefix, delimiter=delimiter)

    def delete(self, keys: Iterable[str]) -> None:  # noqa: D102
        left = list(keys)
        while left:
            batch, left = left[:DELETE_BATCH], left[DELETE_BATCH:]
            failed = self._ask(batch[0], Control.delete, [self._root + key for key in batch])
            if failed:
                raise refused_deletion(self.url, failed)

    def put_file(self, key: str, body: FileSlice, *, only_if_absent: bool = False) -> Stored:  # noqa: D102
        with self.putting_file(key, body, only_if_absent=only_if_absent) as answered:
            return answered()

    @contextmanager
    def putting_file(  # noqa: D102
        self, key: str, body: FileSlice, *, only_if_absent: bool = False
    ) -> Iterator[Callable[[], Stored]]:
        condition = {"If-None-Match": "*"} if only_if_absent and self._takes_conditions else {}
        with ExitStack() as sent:
            with self._translated(key):
                headers = self._object_headers() | self._checksum_header(body, whole=True) | condition
                putting = self._clients.current().bodies.putting
                answered = sent.enter_context(putting(self._root + key, body, headers=headers, sha256=self._signed_hash(body)))
            yield lambda: self._put(key, body, answered)

    def _put(self, key: str, body: FileSlice, answered: Callable[[], str]) -> Stored:
        with self._translated(key):
            stored = Stored(key, body.size_bytes, plain_etag(answered()))
        try:
            self._compare_md5(key, body, stored.etag)
        except CorruptObject:
            self._remove_damaged(stored)
            raise
        return stored

    def copy(self, source: str, target: str, *, etag: str) -> Stored:  # noqa: D102
        there = same_object(self.stat(source), etag)
        origin, place = self._root + source, self._root + target
        try:
            copied = self._ask(target, Control.copy, origin, place, etag=etag, size_bytes=there.size_bytes)
        except AlreadyExists:  # the precondition failed
            raise CorruptObject(source, want=f"etag {etag}", got="the object was replaced") from None
        same_object(self.stat(source), etag)  # some stores ignore the condition
        return Stored(target, there.size_bytes, copied)

    def begin_upload(self, key: str) -> str:  # noqa: D102
        return self._ask(key, Control.begin, self._root + key, checksummed=self.verification is Verification.STORE_CRC)

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> Part:  # noqa: D102
        with self._translated(f"{key} part {number}"):
            putting = self._clients.current().bodies.putting(
                self._root + key,
                body,
                query={"partNumber": number, "uploadId": upload_id},
                headers=self._checksum_header(body, whole=False),
                sha256=self._signed_hash(body),
            )
            with putting as answered:
                etag = answered()
        self._compare_md5(f"{key} part {number}", body, plain_etag(etag))
        return Part(number, body.size_bytes, plain_etag(etag), crc64nvme=body.crc64nvme)

    def complete_upload(self, key: str, upload_id: str, parts: Iterable[Part], *, crc64nvme: int) -> Stored:  # noqa: D102
        ordered = sorted(parts, key=lambda part: part.number)
        is_checked = self.verification is Verification.STORE_CRC and _total_bytes(ordered) > 0  # MinIO refuses that of nothing
        whole = crc64nvme if is_checked else None
        try:
            etag = self._ask(
                key, Control.complete, self._root + key, upload_id, ordered, crc64nvme=whole, of_parts=self.crc_with_parts
            )
        except NotFound:
            return self._completed_before(key, ordered)
        except StoreUnavailable:  # Ceph RGW 16's answer for an upload that no longer exists
            if self._is_pending(key, upload_id):
                raise
            return self._completed_before(key, ordered)
        stored = Stored(key, _total_bytes(ordered), plain_etag(etag))
        if not stored.etag:  # Ceph RGW 16 leaves it out
            stored = self._just_joined(key, ordered)
        if self.verification is Verification.MD5 and stored.etag != (want := multipart_etag(ordered)):
            self._remove_damaged(stored)
            raise CorruptObject(key, want=f"etag {want}", got=f"etag {stored.etag}")
        return stored

    def _just_joined(self, key: str, parts: Sequence[Part]) -> Stored:
        """Return the object of a completed upload whose etag the store left out.

        Raises:
            StoreUnavailable: Another writer has replaced it.
        """
        there, etag = self.stat(key), multipart_etag(parts)
        if there.size_bytes != _total_bytes(parts) or ("-" in there.etag and etag not in ("", there.etag)):
            raise StoreUnavailable(f"{self.url}/{key}: completed, then replaced by another writer; it is tried again")
        return there

    def _is_pending(self, key: str, upload_id: str) -> bool:
        try:
            next(iter(self.list_parts(key, upload_id)), None)
        except NotFound:
            return False
        return True

    def _completed_before(self, key: str, parts: Sequence[Part]) -> Stored:
        """Return the object if an earlier try completed the upload with these parts and its answer was lost.

        A store may forget an upload before its object becomes visible. The lookup is repeated for a while (``JOINING_S``),
        because otherwise all parts would have to be sent again.

        Raises:
            NotFound: No object of these parts appeared.
        """
        for pause_s in (*JOINING_S, None):
            with suppress(NotFound):
                there = self.stat(key)
                if there.size_bytes == _total_bytes(parts) and there.etag == multipart_etag(parts):
                    return there
            if pause_s is not None:
                self._clients.pause(pause_s)
        raise NotFound(f"{self.url}/{key} (unfinished upload)")

    def abort_upload(self, key: str, upload_id: str) -> None:  # noqa: D102
        with suppress(NotFound):
            self._ask(key, Control.abort, self._root + key, upload_id)

    def pending_uploads(self, prefix: str) -> Iterator[PendingUpload]:  # noqa: D102
        with self._translated(prefix or self.url):
            for page in self._clients.pages(Control.pending, self._root + prefix):
                yield from (replace(found, key=found.key.removeprefix(self._root)) for found in page)

    def list_parts(self, key: str, upload_id: str) -> Iterator[Part]:  # noqa: D102
        with self._translated(key):
            for page in self._clients.pages(Control.parts, self._root + key, upload_id):
                yield from page

    def read(  # noqa: D102
        self, key: str, *, offset: int = 0, length: int | None = None, etag: str | None = None
    ) -> AbstractContextManager[Readable]:
        return self._reads.read(key, offset=offset, length=length, etag=etag)

    def reading(self, key: str, *, length: int) -> AbstractContextManager[Callable[[], Readable]]:  # noqa: D102
        return self._reads.reading(key, length=length)

    def hurry(self, hurried: bool) -> None:  # noqa: D102
        self._clients.hurry(hurried)

    def close(self) -> None:  # noqa: D102
        self._clients.close()

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        with self._clients.translated(key if key.startswith("s3://") else f"{self.url}/{key}"):
            yield

    def _ask(
        self, key: str, request: Callable[Concatenate[Control, P], Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Make a small request. Errors name ``key``."""
        with self._translated(key):
            return self._clients.ask(request, *args, **kwargs)

    def _object_headers(self) -> dict[str, str]:
        """Return the headers of every object whose bytes are a file's."""
        options = self._options
        given = {SSE_HEADER: options.sse, f"{SSE_HEADER}-aws-kms-key-id": options.sse_kms_key_id, ACL_HEADER: options.acl}
        return {name: value for name, value in given.items() if value}

    def _checksum_header(self, body: FileSlice, *, whole: bool) -> dict[str, str]:
        """Return the checksum of an object or a part: the cheap one if the store compares it, else one that it wants."""
        if self.verification is Verification.STORE_CRC and (whole or self.crc_with_parts):
            return {CRC_HEADER: base64_crc(body.crc64nvme_ahead())}
        return {"Content-MD5": base64.b64encode(body.md5_ahead()).decode()} if self.md5_with_bodies else {}

    def _signed_hash(self, body: FileSlice) -> str:
        return body.sha256_ahead() if self.verification is Verification.SIGNED_SHA256 else UNSIGNED

    def _compare_md5(self, key: str, body: FileSlice, etag: str) -> None:
        if self.verification is Verification.MD5 and etag != body.md5.hex():
            raise CorruptObject(key, want=f"md5 {body.md5.hex()}", got=f"the store received {etag}")


def _total_bytes(parts: Sequence[Part]) -> int:
    return sum(part.size_bytes for part in parts)
