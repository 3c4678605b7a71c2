"""Requests about whole objects without their bodies: stat, copy, delete."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from urllib.parse import quote
from xml.sax.saxutils import escape

from sidecar.core.schedule.hedging import copy_within_s
from sidecar.store.protocol import Part, Stored
from sidecar.store.s3.answers import client_error
from sidecar.store.s3.listing import pages
from sidecar.store.s3.multipart import NAMESPACE, Multipart
from sidecar.store.s3.requests import S3Requests
from sidecar.store.s3.signing import SAFE_IN_PATHS
from sidecar.store.s3.xml import IncompleteDocument, children, name_of, parsed, texts

COPY_BYTES = 5 << 30
"""Maximum size of a copy in one request. Source: S3 API reference, "CopyObject"."""
COPY_PART_BYTES = 512 << 20
COPIES_AT_ONCE = 4
_AS_REFERENCES = {"\r": "&#13;", "\n": "&#10;"}
"""XML parsers normalise both to a line feed, unless they are character references."""


class Objects:
    """Keys include the store's prefix; raises the errors that boto3 would raise."""

    def __init__(self, bodies: S3Requests, multipart: Multipart, *, bucket: str) -> None:
        self._bodies = bodies
        self._multipart = multipart
        self._bucket = bucket

    def find(self, key: str) -> Stored | None:
        """Return size and etag of an object, or ``None`` if there is none.

        Uses a listing, because its document proves that S3 answered. HeadObject has no body: a load balancer's bare 404 looks
        like the store's. A page may be empty although others follow, so only the last one proves that there is no object.
        """
        for page in pages(self._bodies.list_objects, prefix=key, most=1):
            if page.objects:
                return next((found for found in page.objects if found.key == key), None)
        return None

    def delete(self, keys: Sequence[str]) -> list[tuple[str, str]]:
        """Delete up to 1,000 objects; return the keys of those that were not deleted, each with the store's code.

        Source: S3 API reference, "DeleteObjects".
        """
        named = "".join(f"<Object><Key>{escape(key, _AS_REFERENCES)}</Key></Object>" for key in keys)
        content = f'<Delete xmlns="{NAMESPACE}"><Quiet>true</Quiet>{named}</Delete>'.encode()
        # Content-MD5: every store takes it, and some require it.
        md5 = base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()
        headers, query = {"Content-MD5": md5, "Content-Type": "application/xml"}, {"delete": ""}
        operation = "DeleteObjects"
        answer = self._bodies.ask("POST", "", operation=operation, query=query, headers=headers, content=content)
        document = parsed(answer.content, "DeleteResult", "DeleteObjects", "Error")
        if name_of(document) == "Error":
            raise client_error(answer, operation)
        left = map(texts, children(document, "Error"))
        return [(fields.get("Key", ""), fields.get("Code", "")) for fields in left if fields.get("Code") != "NoSuchKey"]

    def copy(self, source: str, target: str, *, etag: str, size_bytes: int, headers: Mapping[str, str]) -> str:
        """Copy an object inside the store and return the etag of the copy.

        ``headers``: properties of the copy, such as its encryption. A store may ignore the condition on the source's ``etag``.
        """
        of = {
            "x-amz-copy-source": quote(f"/{self._bucket}/{source}", safe=SAFE_IN_PATHS),
            "x-amz-copy-source-if-match": f'"{etag}"',
        }
        if size_bytes > COPY_BYTES:
            return self._copy_in_parts(target, of, size_bytes=size_bytes, headers=headers)
        return self._copied(target, "CopyObject", size_bytes, query={}, headers={**of, **headers})

    def _copy_in_parts(self, target: str, of: Mapping[str, str], *, size_bytes: int, headers: Mapping[str, str]) -> str:
        upload_id = self._multipart.begin(target, headers=headers)

        def copied(number: int) -> Part:
            first = (number - 1) * COPY_PART_BYTES
            last = min(size_bytes, first + COPY_PART_BYTES) - 1
            query = {"partNumber": str(number), "uploadId": upload_id}
            ranged = {**of, "x-amz-copy-source-range": f"bytes={first}-{last}"}
            etag = self._copied(target, "UploadPartCopy", last - first + 1, query=query, headers=ranged)
            return Part(number, last - first + 1, etag.strip('"'))

        try:
            with ThreadPoolExecutor(COPIES_AT_ONCE, "copy") as threads:
                parts = list(threads.map(copied, range(1, -(-size_bytes // COPY_PART_BYTES) + 1)))
            joined = self._multipart.complete(target, upload_id, parts, headers={})
        except BaseException:
            with suppress(Exception):  # the first error matters; the orphan upload is swept later
                self._multipart.abort(target, upload_id)
            raise
        if not joined:
            raise IncompleteDocument("CompleteMultipartUpload: a copy without an ETag")
        return joined

    def _copied(
        self, target: str, operation: str, size_bytes: int, *, query: Mapping[str, str], headers: Mapping[str, str]
    ) -> str:
        """Send a copy request. An error may have status 200, too.

        The request has a deadline and is never hedged: after it, the caller sends the bytes instead.
        """
        within_s = copy_within_s(size_bytes)
        answer = self._bodies.ask(
            "PUT", target, operation=operation, query=query, headers=headers, content=b"", within_s=within_s
        )
        document = parsed(answer.content, "CopyObject" if operation == "CopyObject" else "CopyPart", "Error")
        if name_of(document) == "Error":
            raise client_error(answer, operation)
        if not (etag := texts(document).get("ETag", "").strip().strip('"')):
            raise IncompleteDocument(f"{operation}: no ETag")
        return etag
