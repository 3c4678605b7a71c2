"""Control plane of a bucket: small requests, made by aiobotocore on an event loop. Bodies of files are ``bodies``.

Keys include the store's prefix. Raises botocore's errors, which ``errors`` translates. aiobotocore serialises, signs, parses
and paginates; its own retries are off, and each request has the deadline and the hedges of ``transport``.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, unquote_plus

from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError
from botocore.utils import parse_timestamp

from sidecar.core.schedule.hedging import copy_within_s
from sidecar.store.http.wire import AnswerTooLong, WholeAnswer
from sidecar.store.protocol import Part, PendingUpload, Stored
from sidecar.store.s3.answers import IncompleteDocument, OtherDocument, check_document, check_object
from sidecar.store.s3.attempt import Call
from sidecar.store.s3.errors import code_of
from sidecar.store.s3.hedged import OPERATION
from sidecar.store.s3.transport import limits
from sidecar.tasks import task_group

COPY_BYTES = 5 << 30
"""Maximum size of a copy in one request. Source: S3 API reference, "CopyObject"."""
COPY_PART_BYTES = 512 << 20
COPIES_AT_ONCE = 4
DELETES_AT_ONCE = 16
"""Requests in flight where each object is deleted by its own."""
_ALONE = re.compile(
    "[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]"  # no document can name it (XML 1.0, section 2.2)
    "|(?:^|/)[.]{0,2}(?:/|$)"  # MinIO shortens such a path in a document, and deletes the object there
)
"""Keys that are deleted one by one, not by the document of many."""
_ENCODED = re.compile(r"(?:[\w.~*/!$'()|-]|%[0-9A-Fa-f]{2})*", re.ASCII)
"""What URL encoding leaves of a key, by an encoder that does not use ``+`` for a space."""
_MARKERS = {
    "list_objects_v2": ("NextContinuationToken",),
    "list_multipart_uploads": ("NextKeyMarker", "NextUploadIdMarker"),
    "list_parts": ("NextPartNumberMarker",),
}
_UPLOAD_ID = re.compile(rb"<UploadId>([^<]+)</UploadId>")


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing."""

    objects: list[Stored]
    prefixes: list[str]


class Control:
    """Requests to one bucket with one set of credentials. All methods run on the event loop of its client."""

    def __init__(self, client: Any, *, bucket: str, of_objects: Mapping[str, str]) -> None:
        """Use an aiobotocore client. ``of_objects``: parameters of every write that creates an object."""
        self._client = client
        self._bucket = bucket
        self._of_objects = of_objects
        client.meta.events.register("before-call.s3", _before_call)
        client.meta.events.register_first("before-parse.s3.*", _before_parse)
        client.meta.events.register("after-call.s3.ListMultipartUploads", _decode_keys)

    async def get(self, key: str, *, most_bytes: int) -> WholeAnswer | None:
        """Return a small object, or ``None`` if it is larger than ``most_bytes``."""
        with limits(Call(most_bytes=most_bytes)) as call:
            try:
                await self._ask("get_object", Key=key)
            except AnswerTooLong as error:
                check_object(error.headers, key)
                return None
        check_object(call.headers, key)
        ends = "content-length" in call.headers or "transfer-encoding" in call.headers
        return WholeAnswer(200, call.headers, call.content, ends)

    async def put(self, key: str, content: bytes, *, only_if_absent: bool, crc64nvme: int | None) -> str:
        """Write a small object with its MD5, and with ``crc64nvme`` unless that is ``None``. Returns its etag."""
        md5 = base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()
        options = {"IfNoneMatch": "*"} if only_if_absent else {}
        options |= {} if crc64nvme is None else {"ChecksumCRC64NVME": base64_crc(crc64nvme)}
        written = await self._ask("put_object", Key=key, Body=content, ContentMD5=md5, **options, **self._of_objects)
        return _etag(written)

    async def find(self, key: str) -> Stored | None:
        """Return size and etag of an object, or ``None`` if there is none.

        Uses a listing, because its document proves that S3 answered. HeadObject has no body: a load balancer's bare 404 looks
        like the store's. A page may be empty although others follow, so only the last one proves that there is no object.
        """
        async for page in self.pages(key, most=1):
            if page.objects:
                return next((found for found in page.objects if found.key == key), None)
        return None

    async def pages(self, prefix: str, *, delimiter: str = "", most: int | None = None) -> AsyncIterator[Page]:
        """Yield the pages of a listing; ``most``: maximum number of objects in a page, ``None``: the store's own."""
        options = ({"Delimiter": delimiter} if delimiter else {}) | ({} if most is None else {"MaxKeys": most})
        async for page in self._pages("list_objects_v2", Prefix=prefix, **options):
            objects = [_stored(fields) for fields in page.get("Contents", ())]
            prefixes = [_text(fields, "Prefix") for fields in page.get("CommonPrefixes", ())]
            if not all(name.startswith(prefix) for name in (*(found.key for found in objects), *prefixes)):
                raise IncompleteDocument("ListObjectsV2: the listing of another prefix")  # from a cache that ignores the query
            yield Page(objects, prefixes)

    async def delete(self, keys: Sequence[str]) -> list[tuple[str, str]]:
        """Delete up to 1,000 objects; return the keys of those that were not deleted, each with the store's code."""
        await self._delete_each([key for key in keys if _ALONE.search(key)])
        if not (named_keys := [key for key in keys if not _ALONE.search(key)]):
            return []
        named = {"Objects": [{"Key": key} for key in named_keys], "Quiet": True}
        try:
            failed = (await self._ask("delete_objects", Delete=named)).get("Errors", ())
        except ClientError as error:
            if code_of(error) != "AccessDenied":
                raise
            # Ceph RGW wants s3:DeleteObject on the bucket itself for this request. On the objects it may be granted.
            await self._delete_each(named_keys)
            return []
        return [(error.get("Key", ""), error.get("Code", "")) for error in failed if error.get("Code") != "NoSuchKey"]

    async def _delete_each(self, keys: Sequence[str]) -> None:
        """Delete objects by a request for each. Raises the first error once no request is in flight."""
        for first in range(0, len(keys), DELETES_AT_ONCE):
            asked = [self._ask("delete_object", Key=key) for key in keys[first : first + DELETES_AT_ONCE]]
            for answer in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(answer, BaseException):
                    raise answer

    async def copy(self, source: str, target: str, *, etag: str, size_bytes: int) -> str:
        """Copy an object inside the store, if it has this etag, and return the etag of the copy.

        A store may ignore the condition. The requests have a deadline and are never hedged: after it, the caller sends the
        bytes instead.
        """
        of = {"CopySource": {"Bucket": self._bucket, "Key": source}, "CopySourceIfMatch": f'"{etag}"'}
        if size_bytes > COPY_BYTES:
            return await self._copy_in_parts(target, of, size_bytes)
        with limits(Call(within_s=copy_within_s(size_bytes))):
            copied = await self._ask("copy_object", Key=target, **of, **self._of_objects)
        return _etag(copied.get("CopyObjectResult", {}))

    async def _copy_in_parts(self, target: str, of: Mapping[str, Any], size_bytes: int) -> str:
        upload_id, turns = await self.begin(target, checksummed=False), asyncio.Semaphore(COPIES_AT_ONCE)

        async def copied(number: int) -> Part:
            first = (number - 1) * COPY_PART_BYTES
            last = min(size_bytes, first + COPY_PART_BYTES) - 1
            place = {"Key": target, "UploadId": upload_id, "PartNumber": number, "CopySourceRange": f"bytes={first}-{last}"}
            async with turns:
                with limits(Call(within_s=copy_within_s(last - first + 1))):
                    answer = await self._ask("upload_part_copy", **place, **of)
            return Part(number, last - first + 1, _etag(answer.get("CopyPartResult", {})))

        try:
            async with task_group() as copies:
                numbers = range(1, -(-size_bytes // COPY_PART_BYTES) + 1)
                parts = [copies.create_task(copied(number)) for number in numbers]
            joined = await self.complete(target, upload_id, [part.result() for part in parts])
        except BaseException:
            with suppress(Exception):  # the first error matters; the orphan upload is swept later
                await self.abort(target, upload_id)
            raise
        if not joined:
            raise IncompleteDocument("CompleteMultipartUpload: a copy without an ETag")
        return joined

    async def begin(self, key: str, *, checksummed: bool) -> str:
        """Create an upload and return its id. ``checksummed``: the store is going to verify the whole object's CRC64NVME.

        A hedged request creates two uploads; the second one is aborted when its id arrives.
        """

        async def unwanted(content: bytes) -> None:
            if matched := _UPLOAD_ID.search(content):
                with suppress(Exception):
                    await self.abort(key, matched[1].decode())

        checksums = {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"} if checksummed else {}
        with limits(Call(unwanted=unwanted)):
            begun = await self._ask("create_multipart_upload", Key=key, **checksums, **self._of_objects)
        if not (upload_id := begun.get("UploadId")):
            raise OtherDocument("an upload was begun, and its id is missing")
        return str(upload_id)

    async def complete(
        self, key: str, upload_id: str, parts: Sequence[Part], *, crc64nvme: int | None = None, of_parts: bool = False
    ) -> str:
        """Complete an upload from ``parts``, in order, and return the object's etag; empty if the store does not give it.

        Args:
            key: Key of the object.
            upload_id: Id of the upload.
            parts: The parts, in order of number.
            crc64nvme: Checksum of the whole, for a store that verifies it; ``None``: none is sent.
            of_parts: The store wants each part's checksum, too. Those of unknown parts are left out.
        """
        named = [
            {"PartNumber": part.number, "ETag": f'"{part.etag}"'}
            | ({"ChecksumCRC64NVME": base64_crc(part.crc64nvme)} if of_parts and part.crc64nvme is not None else {})
            for part in parts
        ]
        whole = {} if crc64nvme is None else {"ChecksumCRC64NVME": base64_crc(crc64nvme), "ChecksumType": "FULL_OBJECT"}
        joined = await self._ask(
            "complete_multipart_upload", Key=key, UploadId=upload_id, MultipartUpload={"Parts": named}, **whole
        )
        return str(joined.get("ETag", "")).strip().strip('"')

    async def abort(self, key: str, upload_id: str) -> None:
        """Abort an upload and delete its parts. Source: S3 API reference, "AbortMultipartUpload": the status is 204.

        Raises:
            IncompleteDocument: The upload still exists, although the answer, possibly a proxy's, was a success.
        """
        aborted = await self._ask("abort_multipart_upload", Key=key, UploadId=upload_id)
        if aborted["ResponseMetadata"]["HTTPStatusCode"] == 204:
            return
        async for _ in self.parts(key, upload_id):  # an error of S3, if it is gone
            break
        raise IncompleteDocument("AbortMultipartUpload: a success, and the upload is still there")

    async def pending(self, prefix: str) -> AsyncIterator[list[PendingUpload]]:
        """Yield the pages of unfinished uploads of all keys with a prefix."""
        async for page in self._pages("list_multipart_uploads", Prefix=prefix, EncodingType="url"):
            listed_at_s = _at_s(page["ResponseMetadata"]["HTTPHeaders"].get("date"))
            yield [
                PendingUpload(_text(fields, "Key"), _text(fields, "UploadId"), _at_s(fields.get("Initiated")), listed_at_s)
                for fields in page.get("Uploads", ())
            ]

    async def parts(self, key: str, upload_id: str) -> AsyncIterator[list[Part]]:
        """Yield the pages of stored parts of an unfinished upload."""
        async for page in self._pages("list_parts", Key=key, UploadId=upload_id):
            yield [_part(fields) for fields in page.get("Parts", ())]

    async def _pages(self, operation: str, **asked: Any) -> AsyncIterator[dict[str, Any]]:
        """Yield the answers to a paginated operation.

        Raises:
            IncompleteDocument: A truncated page does not say where the next one begins, or one comes twice: what is missing
                from a listing counts as deleted, aborted or not sent.
        """
        seen: set[tuple[str, ...]] = set()
        try:
            async for page in self._client.get_paginator(operation).paginate(Bucket=self._bucket, **asked):
                markers = tuple(str(page.get(name) or "") for name in _MARKERS[operation])
                if page.get("IsTruncated") and not any(markers):
                    raise IncompleteDocument(f"{operation}: IsTruncated without {' and '.join(_MARKERS[operation])}")
                if page.get("IsTruncated") and markers in seen:
                    raise IncompleteDocument(f"{operation}: the same page again")
                seen.add(markers)
                yield page
        except (ResponseParserError, ValueError) as error:
            raise _not_parsed(error) from None

    async def _ask(self, operation: str, **asked: Any) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = await getattr(self._client, operation)(Bucket=self._bucket, **asked)
        except (ResponseParserError, ValueError) as error:
            raise _not_parsed(error) from None
        return answer


def multipart_etag(parts: Sequence[Part]) -> str:
    """Return the etag that S3, RGW and MinIO give a multipart object: MD5 of its parts' MD5s. Empty if etags are no MD5s."""
    try:
        digests = b"".join(bytes.fromhex(part.etag) for part in parts)
    except ValueError:
        return ""
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"


def base64_crc(crc: int) -> str:
    """Return a CRC64NVME as S3 writes it."""
    return base64.b64encode(crc.to_bytes(8, "big")).decode()


def _before_call(model: Any, params: dict[str, Any], **_: Any) -> None:
    context = params["context"]
    context[OPERATION] = model.name
    if "s3_redirect" in context:  # an error names the right region; bodies would go to the wrong one all the same
        context["s3_redirect"]["redirected"] = True
    headers = params["headers"]
    headers.pop("Expect", None)  # a small body leaves with its headers
    if model.name == "DeleteObjects":  # every store takes an MD5, and some require it
        context.pop("checksum", None)
        headers["Content-MD5"] = base64.b64encode(hashlib.md5(params["body"], usedforsecurity=False).digest()).decode()


def _decode_keys(parsed: dict[str, Any], **_: Any) -> None:
    """Decode the keys of unfinished uploads, as botocore does those of objects; also the one where the next page begins.

    Ceph RGW 16 encodes them as it is asked to, and does not say so.
    """
    if (told := parsed.get("EncodingType")) not in ("url", None, ""):
        return
    for fields, name in [(parsed, "NextKeyMarker"), *((upload, "Key") for upload in parsed.get("Uploads", ()))]:
        if told and name in fields:
            fields[name] = unquote_plus(fields[name])
        elif name in fields and _ENCODED.fullmatch(fields[name]):
            fields[name] = unquote(fields[name])


def _before_parse(operation_model: Any, response_dict: dict[str, Any], **_: Any) -> None:
    check_document(operation_model.name, response_dict)


def _not_parsed(error: Exception) -> Exception:
    """Return the error for an answer that botocore could not parse: it was S3's to begin with (``check_document``)."""
    if isinstance(error, IncompleteDocument | OtherDocument):
        return error
    return IncompleteDocument(" ".join(str(error).split())[:200])


def _text(fields: Mapping[str, Any], name: str) -> str:
    if not (text := fields.get(name)):
        raise IncompleteDocument(f"a listing with no {name}")
    return str(text)


def _size(fields: Mapping[str, Any]) -> int:
    size = fields.get("Size")
    if not isinstance(size, int) or size < 0:
        raise IncompleteDocument(f"a listing with the Size {str(size)[:30]}")
    return size


def _etag(fields: Mapping[str, Any]) -> str:
    if not (etag := str(fields.get("ETag", "")).strip().strip('"')):
        raise IncompleteDocument("no ETag")
    return etag


def _stored(fields: Mapping[str, Any]) -> Stored:
    return Stored(_text(fields, "Key"), _size(fields), fields.get("ETag", "").strip('"'), fields.get("LastModified", ""))


def _part(fields: Mapping[str, Any]) -> Part:
    number, crc = fields.get("PartNumber"), None
    if not isinstance(number, int):
        raise IncompleteDocument("a part with no number")
    with suppress(KeyError, ValueError):
        crc = int.from_bytes(base64.b64decode(fields["ChecksumCRC64NVME"], validate=True), "big")
    return Part(number, _size(fields), _text(fields, "ETag").strip('"'), _at_s(fields.get("LastModified")), crc)


def _at_s(text: str | None) -> float:
    """Return the epoch seconds of a time in a document or a header; 0 where it is missing or malformed."""
    try:
        return float(parse_timestamp(text).timestamp()) if text else 0.0
    except (ValueError, OverflowError, TypeError):
        return 0.0
