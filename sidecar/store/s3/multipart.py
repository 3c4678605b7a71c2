"""Multipart uploads: create, complete, abort and list. ``requests`` sends the parts themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from urllib.parse import unquote_plus
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from botocore.parsers import ResponseParserError
from botocore.utils import parse_timestamp

from sidecar.store.http.answer import OpenAnswer
from sidecar.store.protocol import Part, PendingUpload
from sidecar.store.s3.answers import client_error
from sidecar.store.s3.requests import S3Requests
from sidecar.store.s3.xml import IncompleteDocument, children, name_of, number, parsed, texts

MAX_ID_BYTES = 16 << 10
"""Maximum length of the answer to CreateMultipartUpload."""
NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


class Multipart:
    """One request per call, or per page. Keys include the store's prefix; raises the errors that boto3 would raise."""

    def __init__(self, bodies: S3Requests) -> None:
        self._bodies = bodies

    def begin(self, key: str, *, headers: Mapping[str, str]) -> str:
        """Create an upload and return its id. Source: S3 API reference, "CreateMultipartUpload".

        A hedged request creates two uploads; the second one is aborted when its id arrives.
        """

        def unwanted(answer: OpenAnswer) -> None:
            if answer.status < 300 and (other := _upload_id(answer.read(MAX_ID_BYTES))):
                self.abort(key, other)

        operation, query = "CreateMultipartUpload", {"uploads": ""}
        answer = self._bodies.ask(
            "POST", key, operation=operation, query=query, headers=headers, content=b"", unwanted=unwanted
        )
        upload_id = _upload_id(answer.content)
        if not upload_id:
            raise ResponseParserError("an upload was begun, and its id is missing")
        return upload_id

    def complete(self, key: str, upload_id: str, parts: Iterable[Part], *, headers: Mapping[str, str]) -> str:
        """Complete an upload from ``parts``, in order, and return the object's etag; empty if the store does not give it.

        Raises:
            IncompleteDocument: The answer is empty, so the outcome is unknown.

        Source: S3 API reference, "CompleteMultipartUpload": an error may have status 200, too.
        """
        operation = "CompleteMultipartUpload"
        content = f'<{operation} xmlns="{NAMESPACE}">{"".join(map(_listed, parts))}</{operation}>'.encode()
        query = {"uploadId": upload_id}
        answer = self._bodies.ask("POST", key, operation=operation, query=query, headers=headers, content=content)
        document = parsed(answer.content, operation, "Error")
        if name_of(document) == "Error":
            raise client_error(answer, operation)
        return texts(document).get("ETag", "").strip().strip('"')

    def abort(self, key: str, upload_id: str) -> None:
        """Abort an upload and delete its parts. Source: S3 API reference, "AbortMultipartUpload": the status is 204.

        Raises:
            IncompleteDocument: The upload still exists, although the answer, possibly a proxy's, was a success.
        """
        answer = self._bodies.ask("DELETE", key, operation="AbortMultipartUpload", query={"uploadId": upload_id})
        if answer.status == 204:
            return
        next(self.parts(key, upload_id), None)  # an error of S3, if it is gone
        raise IncompleteDocument(f"AbortMultipartUpload: {answer.status}, and the upload is still there")

    def pending(self, prefix: str) -> Iterator[PendingUpload]:
        """Yield the unfinished uploads of all keys with a prefix. Source: S3 API reference, "ListMultipartUploads"."""
        query = {"uploads": "", "prefix": prefix, "encoding-type": "url"}
        markers = {"key-marker": "NextKeyMarker", "upload-id-marker": "NextUploadIdMarker"}
        for page, listed_at_s in self._pages("", "ListMultipartUploads", query, markers):
            for fields in map(texts, children(page, "Upload")):
                yield _pending(fields, listed_at_s, is_quoted=_is_quoted(page))

    def parts(self, key: str, upload_id: str) -> Iterator[Part]:
        """Yield the stored parts of an unfinished upload. Source: S3 API reference, "ListParts"."""
        for page, _ in self._pages(key, "ListParts", {"uploadId": upload_id}, {"part-number-marker": "NextPartNumberMarker"}):
            yield from map(_part, map(texts, children(page, "Part")))

    def _pages(
        self, key: str, operation: str, query: Mapping[str, str], markers: Mapping[str, str]
    ) -> Iterator[tuple[ElementTree.Element, float]]:
        """Yield the pages of a listing, each with its time by the store's clock in epoch seconds (0: unknown).

        Args:
            key: Key of the object; empty: the bucket.
            operation: S3's name of the operation.
            query: Query of the first page.
            markers: Query parameters of the next page, by the name of the element that holds their value.
        """
        seen: set[tuple[str, ...]] = set()
        while True:
            answer = self._bodies.ask("GET", key, operation=operation, query=query)
            page = parsed(answer.content, operation)
            yield page, _at_s(answer.headers.get("date"))
            document = texts(page)
            if document.get("IsTruncated", "").lower() != "true":
                return
            after = {asked: document.get(element, "") for asked, element in markers.items()}
            if not any(after.values()):  # uploads and parts missing from a listing count as aborted, or not sent
                raise IncompleteDocument(f"{operation}: IsTruncated without {' and '.join(markers.values())}")
            if _is_quoted(page):
                after = {asked: unquote_plus(value) if asked == "key-marker" else value for asked, value in after.items()}
            if (place := tuple(after.values())) in seen:
                raise IncompleteDocument(f"{operation}: behind {after} there is the same page again")
            seen.add(place)
            query = {**query, **after}


def _upload_id(content: bytes) -> str | None:
    return texts(parsed(content, "InitiateMultipartUpload")).get("UploadId")


def multipart_etag(parts: Sequence[Part]) -> str:
    """Return the etag that S3, RGW and MinIO give a multipart object: MD5 of its parts' MD5s. Empty if etags are no MD5s."""
    try:
        digests = b"".join(bytes.fromhex(part.etag) for part in parts)
    except ValueError:
        return ""
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"


def _listed(part: Part) -> str:
    etag = escape(f'"{part.etag}"')
    return f"<Part><ETag>{etag}</ETag><PartNumber>{part.number}</PartNumber></Part>"


def _part(fields: Mapping[str, str]) -> Part:
    try:
        stored_at_s = _at_s(fields.get("LastModified"))
        return Part(number(fields["PartNumber"]), number(fields["Size"]), fields["ETag"].strip('"'), stored_at_s)
    except (KeyError, ValueError) as error:
        raise ResponseParserError(f"a part with {error}") from None


def _pending(fields: Mapping[str, str], listed_at_s: float, *, is_quoted: bool) -> PendingUpload:
    try:
        key, begun_at_s = fields["Key"], _at_s(fields.get("Initiated"))
        return PendingUpload(unquote_plus(key) if is_quoted else key, fields["UploadId"], begun_at_s, listed_at_s)
    except (KeyError, ValueError, OverflowError) as error:
        raise ResponseParserError(f"an upload with {error}") from None


def _at_s(text: str | None) -> float:
    """Return the epoch seconds of a time in a document or a header; 0 where it is missing or malformed."""
    try:
        return float(parse_timestamp(text).timestamp()) if text else 0.0
    except (ValueError, OverflowError, TypeError):
        return 0.0


def _is_quoted(page: ElementTree.Element) -> bool:
    return texts(page).get("EncodingType") == "url"
