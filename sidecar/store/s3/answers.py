"""Validation of successful answers, by operation: an answer that S3 would not give is rejected.

Proxies, firewalls and load balancers may answer in the store's place: with a page and status 200, with a bare 404, with a
compressed or truncated body. ``errors`` recognises S3's errors by their XML document; this module recognises its successes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError

from sidecar.errors import StoreUnavailable
from sidecar.store.http.answer import OpenAnswer
from sidecar.store.http.wire import Answer
from sidecar.store.s3.xml import IncompleteDocument, parsed, texts

_SUCCESS = {"GetObject": frozenset({200, 206}), "AbortMultipartUpload": frozenset({200, 204})}
_USUAL_SUCCESS = frozenset({200})
_UNCHANGED = frozenset({"", "identity", "aws-chunked"})
"""Content-Encoding values that leave the stored bytes unchanged. Some stores repeat the one of the upload."""
_PAGES = (".html", ".htm", ".xhtml")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")


def accepted(answer: Answer, operation: str) -> Answer:
    """Return the answer if its status is a success of this operation.

    Raises:
        ClientError: The status is another one; the error is the one that boto3 would raise.
    """
    if answer.status not in _SUCCESS.get(operation, _USUAL_SUCCESS):
        raise client_error(answer, operation)
    return answer


def client_error(answer: Answer, operation: str) -> ClientError:
    """Return the error that boto3 would raise for an answer without success."""
    error: dict[str, str] = {}
    with suppress(ResponseParserError):
        error = texts(parsed(answer.content, "Error"))
    answered: Any = {
        "Error": {"Code": error.pop("Code", str(answer.status))} | error,
        "ResponseMetadata": {"HTTPStatusCode": answer.status, "HTTPHeaders": dict(answer.headers)},
    }
    return ClientError(answered, operation)


def etag_of_write(answer: Answer, operation: str) -> str:
    """Return the ETag header of a written object or part.

    Raises:
        IncompleteDocument: The header is missing, or the answer has a body: it does not come from the store.
    """
    etag = answer.headers.get("etag", "")
    if not etag.strip('"') or answer.content.strip():
        raise IncompleteDocument(
            f"{operation}: {answer.status} {'and a page' if answer.content.strip() else 'without an ETag'}"
        )
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


def object_bytes(name: str, answer: OpenAnswer, offset: int, length: int | None) -> int | None:
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
