"""Validation of successful answers, by operation: an answer that S3 would not give is rejected.

Proxies, firewalls and load balancers may answer in the store's place: with a page and status 200, with a bare 404, with a
compressed or truncated body. botocore parses what it is given, and takes a page for an empty listing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError, RestXMLParser

from sidecar.errors import StoreUnavailable

_ROOTS = {
    "ListObjectsV2": "ListBucketResult",
    "CopyObject": "CopyObject",
    "UploadPartCopy": "CopyPart",
    "CreateMultipartUpload": "InitiateMultipartUpload",
    "CompleteMultipartUpload": "CompleteMultipartUpload",
    "ListMultipartUploads": "ListMultipartUploads",
    "ListParts": "ListParts",
    "DeleteObjects": "Delete",
}
"""First letters of the root element's name, by operation; some stores end it differently."""
_SUCCESS = {"GetObject": frozenset({200, 206}), "AbortMultipartUpload": frozenset({200, 204}), "DeleteObject": frozenset({204})}
_USUAL_SUCCESS = frozenset({200})
_UNCHANGED = frozenset({"", "identity", "aws-chunked"})
"""Content-Encoding values that leave the stored bytes unchanged. Some stores repeat the one of the upload."""
_PAGES = (".html", ".htm", ".xhtml")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")
_ROOT = re.compile(rb"(?:\xef\xbb\xbf)?(?:\s|<\?.*?\?>|<!--.*?-->)*<(?:[\w.-]+:)?([\w.-]+)", re.DOTALL)


class IncompleteDocument(ResponseParserError):
    """An answer of S3 that is truncated, contradictory or lacks a required element. The request is retried."""


class OtherDocument(ResponseParserError):
    """An answer that is not S3's."""


class OpenBody(Protocol):
    """An answer whose body is not read yet. Header names are in lower case."""

    status: int
    headers: dict[str, str]
    is_chunked: bool
    body_bytes: int | None
    """Length of the body by its head; ``None``: the head does not give it."""

    @property
    def is_whole(self) -> bool:
        """Whether the body was read to its end."""
        ...

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill the beginning of ``buffer`` and return the count; 0 at EOF, also a premature one (see ``is_whole``)."""
        ...


def check_document(operation: str, answer: dict[str, Any]) -> None:
    """Check an answer of which botocore is going to parse the body, in botocore's form.

    The body of an error that is not S3's is removed, so that botocore names the status instead.

    Raises:
        IncompleteDocument: It is empty or cut off, or says something else than such an answer does.
        OtherDocument: It is not S3's.
        ClientError: Its status is another success than this operation's.
    """
    status, content = answer["status_code"], answer["body"]
    root = _root_of(content) if isinstance(content, bytes) else ""
    if status >= 300:
        answer["body"] = content.strip() if root == "Error" else b""
        return
    if not is_success(status, operation):
        raise client_error(status, answer["headers"], b"", operation)
    if operation == "PutObject":
        etag_of_write(answer["headers"], content, operation)
    if (wanted := _ROOTS.get(operation)) is None:
        return
    answer["body"] = content.strip()  # spaces before a declaration, as a keep-alive during long operations
    if root == "Error" or root.startswith(wanted):
        return
    is_cut_off = root == "" and answer["body"].startswith(b"<?xml")
    if not answer["body"] or is_cut_off or (root and wanted.startswith(root)):
        raise IncompleteDocument(f"{operation}: {'cut off' if answer['body'] else 'empty'}")
    raise OtherDocument(f"no {wanted}: {f'<{root[:50]}>' if root else 'no XML'}")


def _root_of(content: bytes) -> str:
    matched = _ROOT.match(content[:1000])
    return matched[1].decode("latin-1") if matched else ""


def is_success(status: int, operation: str) -> bool:
    """Whether a status is a success of this operation."""
    return status in _SUCCESS.get(operation, _USUAL_SUCCESS)


def client_error(status: int, headers: Mapping[str, str], content: bytes, operation: str) -> ClientError:
    """Return the error that botocore raises for an answer without success. A document that is not S3's is left out."""
    answered: Any = {"Error": {"Code": str(status)}, "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers}}
    if _root_of(content) == "Error":
        with suppress(ResponseParserError):
            answer = {"status_code": max(status, 400), "headers": headers, "body": content.strip()}
            answered["Error"] |= RestXMLParser().parse(answer, None)["Error"]  # type: ignore[arg-type]  # an error has no shape
    return ClientError(answered, operation)


def etag_of_write(headers: Mapping[str, str], content: bytes, operation: str) -> str:
    """Return the ETag header of a written object or part.

    Raises:
        IncompleteDocument: The header is missing, or the answer has a body: it does not come from the store.
    """
    etag = headers.get("etag", "")
    if not etag.strip('"') or content.strip():
        raise IncompleteDocument(f"{operation}: {'a page' if content.strip() else 'no ETag'}")
    return etag


def check_object(headers: Mapping[str, str], key: str) -> None:
    """Check that the head of a GetObject answer is S3's: a strong etag, no encoding, no HTML page.

    Raises:
        IncompleteDocument: It is a page, or a proxy has changed the bytes.
    """
    etag = headers.get("etag", "")
    if not etag.strip('"') or etag.startswith("W/"):
        raise IncompleteDocument(f"GetObject: {'a weak' if etag else 'no'} ETag")
    if (coding := headers.get("content-encoding", "").lower()) not in _UNCHANGED:
        raise IncompleteDocument(f"GetObject: Content-Encoding {coding[:30]}: a proxy on the way changes the stored bytes")
    if headers.get("content-type", "").lower().startswith("text/html") and not key.lower().endswith(_PAGES):
        raise IncompleteDocument("GetObject: an HTML page")


def object_bytes(name: str, answer: OpenBody, offset: int, length: int | None) -> int | None:
    """Return the number of bytes from ``offset`` on that an answer to a read holds; ``None``: its head does not say.

    Raises:
        StoreUnavailable: It holds another range than the one requested.
    """
    is_ranged = bool(offset) or length is not None
    declared = answer.headers.get("content-range", "")
    if answer.status == 200 and not offset:
        return answer.body_bytes
    matched = _CONTENT_RANGE.fullmatch(declared)
    if answer.status == 206 and is_ranged and matched is not None:
        first, last = int(matched[1]), int(matched[2])
        is_possible = (
            first <= last and (matched[3] == "*" or last < int(matched[3])) and (length is None or last < offset + length)
        )
        if first == offset and is_possible and answer.body_bytes in (None, last - first + 1):
            return last - first + 1
    end = "the end" if length is None else str(offset + length - 1)
    raise StoreUnavailable(
        f"{name}: requested bytes {offset} to {end}, the store answered {answer.status} with Content-Range {declared[:60]!r} "
        f"and Content-Length {answer.body_bytes}; it is tried again"
    )


def plain_etag(text: str) -> str:
    """Return an etag without its quotes, and without the mark of a proxy that takes it for a weak one."""
    return text.removeprefix("W/").strip('"')
