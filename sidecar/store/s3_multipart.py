"""Multipart uploads but for the bytes of their parts: begun, joined, aborted and listed over the wire that carries those."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import unquote_plus
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from botocore.parsers import ResponseParserError
from botocore.utils import parse_timestamp

from sidecar.store.protocol import Part, PendingUpload
from sidecar.store.s3_bodies import Bodies, client_error
from sidecar.store.s3_xml import children, name_of, parsed, texts

_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


class Multipart:
    """One request per call, or per page. Keys are whole, as the bucket has them; raises what boto3 would."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies

    def begin(self, key: str, *, headers: Mapping[str, str]) -> str:
        """Begin an upload and return its id. Source: S3 API reference, "CreateMultipartUpload"."""
        query = {"uploads": ""}
        answer = self._bodies.ask("POST", key, operation="CreateMultipartUpload", query=query, headers=headers, content=b"")
        upload_id = texts(parsed(answer.content, "InitiateMultipartUpload")).get("UploadId")
        if not upload_id:
            raise ResponseParserError("an upload was begun, and its id is missing")
        return upload_id

    def complete(self, key: str, upload_id: str, parts: Iterable[Part], *, headers: Mapping[str, str]) -> str:
        """Join parts, which are in order, and return the object's etag; empty if the store does not say it.

        Source: S3 API reference, "CompleteMultipartUpload": what went wrong may come with status 200, too.
        """
        operation = "CompleteMultipartUpload"
        content = f'<{operation} xmlns="{_NAMESPACE}">{"".join(map(_listed, parts))}</{operation}>'.encode()
        query = {"uploadId": upload_id}
        answer = self._bodies.ask("POST", key, operation=operation, query=query, headers=headers, content=content)
        if not answer.content.strip():
            return ""
        said = parsed(answer.content, operation, "Error")
        if name_of(said) == "Error":
            raise client_error(answer, operation)
        return texts(said).get("ETag", "")

    def abort(self, key: str, upload_id: str) -> None:
        """Drop an upload and its parts. Source: S3 API reference, "AbortMultipartUpload"."""
        self._bodies.ask("DELETE", key, operation="AbortMultipartUpload", query={"uploadId": upload_id})

    def pending(self, prefix: str) -> Iterator[PendingUpload]:
        """Yield the unfinished uploads of all keys with a prefix. Source: S3 API reference, "ListMultipartUploads"."""
        query = {"uploads": "", "prefix": prefix, "encoding-type": "url"}
        markers = {"key-marker": "NextKeyMarker", "upload-id-marker": "NextUploadIdMarker"}
        for page in self._pages("", "ListMultipartUploads", query, markers):
            for told in map(texts, children(page, "Upload")):
                yield _pending(told, is_quoted=_is_quoted(page))

    def parts(self, key: str, upload_id: str) -> Iterator[Part]:
        """Yield the parts that an unfinished upload has. Source: S3 API reference, "ListParts"."""
        for page in self._pages(key, "ListParts", {"uploadId": upload_id}, {"part-number-marker": "NextPartNumberMarker"}):
            yield from map(_part, map(texts, children(page, "Part")))

    def _pages(
        self, key: str, operation: str, query: Mapping[str, str], markers: Mapping[str, str]
    ) -> Iterator[ElementTree.Element]:
        """Ask for one page after another. ``markers``: what the next is asked for with, by what the answer calls it."""
        while True:
            page = parsed(self._bodies.ask("GET", key, operation=operation, query=query).content, operation)
            yield page
            said = texts(page)
            if said.get("IsTruncated") != "true":
                return
            after = {asked: said.get(told, "") for asked, told in markers.items()}
            if _is_quoted(page):
                after = {asked: unquote_plus(value) if asked == "key-marker" else value for asked, value in after.items()}
            if after.items() <= query.items():
                raise ResponseParserError(f"{operation}: behind {after} there is the same page again")
            query = {**query, **after}


def _listed(part: Part) -> str:
    etag = escape(f'"{part.etag}"')
    return f"<Part><ETag>{etag}</ETag><PartNumber>{part.number}</PartNumber></Part>"


def _part(told: Mapping[str, str]) -> Part:
    try:
        return Part(int(told["PartNumber"]), int(told["Size"]), told["ETag"].strip('"'))
    except (KeyError, ValueError) as error:
        raise ResponseParserError(f"a part with {error}") from None


def _pending(told: Mapping[str, str], *, is_quoted: bool) -> PendingUpload:
    try:
        key, begun_at = told["Key"], told.get("Initiated")
        begun_at_s = parse_timestamp(begun_at).timestamp() if begun_at else 0.0
        return PendingUpload(unquote_plus(key) if is_quoted else key, told["UploadId"], begun_at_s)
    except (KeyError, ValueError) as error:
        raise ResponseParserError(f"an upload with {error}") from None


def _is_quoted(page: ElementTree.Element) -> bool:
    return texts(page).get("EncodingType") == "url"
