"""Objects' bodies, and what else is read, on their way to and from an S3 server: one signed request each, over the wire."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError

from sidecar.errors import StoreUnavailable
from sidecar.store.s3_client import AGAIN, AGAIN_IN_S, Access
from sidecar.store.s3_errors import translated
from sidecar.store.s3_signing import UNSIGNED
from sidecar.store.s3_xml import parsed, texts
from sidecar.store.slice import FileSlice
from sidecar.store.wire import MAX_ERROR_BYTES, Answer, Request, whole
from sidecar.store.wire_answer import OpenAnswer


class Bodies:
    """Sends and fetches; raises ``ClientError`` where boto3 would."""

    def __init__(self, access: Callable[[], Access]) -> None:
        self._access = access

    @contextmanager
    def putting(
        self,
        key: str,
        body: FileSlice,
        *,
        operation: str,
        query: Mapping[str, str | int] | None = None,
        headers: Mapping[str, str] | None = None,
        sha256: str = UNSIGNED,
    ) -> Iterator[Callable[[], str]]:
        """Send an object or a part; what this yields waits for the answer and returns the etag."""
        access = self._access()
        request = access.signer.request("PUT", key, query=query, headers=headers, body=body, sha256=sha256)
        with access.wire.sent(request) as answered:
            yield lambda: _etag(_accepted(whole(answered()), operation))

    def put_document(self, key: str, content: bytes, *, headers: Mapping[str, str]) -> str:
        """Send a small object, with its hash in the signature, and return its etag. A lone 5xx gets a second try."""
        return _etag(self.ask("PUT", key, operation="PutObject", headers=headers, content=content))

    @contextmanager
    def getting(self, key: str, headers: Mapping[str, str]) -> Iterator[Callable[[], OpenAnswer]]:
        """Ask for an object, or the range that the headers name; what this yields waits for the answer's head."""
        access = self._access()
        with access.wire.sent(access.signer.request("GET", key, headers=headers)) as answered:
            yield lambda: _success(answered(), "GetObject")

    def read(self, key: str = "", *, operation: str, query: Mapping[str, str] | None = None) -> bytes:
        """Return a small object, or what the bucket answers to a query. A lone 5xx gets a second try."""
        return self.ask("GET", key, operation=operation, query=query).content

    def ask(
        self,
        method: str,
        key: str,
        *,
        operation: str,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
    ) -> Answer:
        """Make a small request, and once more after a lone 5xx. The hash of what is sent is in the signature."""
        access = self._access()
        sha256 = UNSIGNED if content is None else hashlib.sha256(content).hexdigest()

        def made() -> Request:
            return access.signer.request(method, key, query=query, headers=headers, body=content, sha256=sha256)

        answer = access.wire.exchange(made())
        if answer.status in AGAIN:
            time.sleep(AGAIN_IN_S)
            answer = access.wire.exchange(made())
        return _accepted(answer, operation)


class Incoming:
    """A body that cannot end early without being noticed."""

    def __init__(self, name: str, stream: OpenAnswer, *, left: int) -> None:
        self._name = name
        self._stream = stream
        self._left = left

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill the beginning of ``buffer``; 0 only at the end."""
        if not self._left:
            return 0
        with translated(self._name):
            count: int = self._stream.readinto(buffer[: min(len(buffer), self._left)])
        if not count:
            raise StoreUnavailable(f"{self._name}: the answer ended {self._left} bytes early; it is tried again")
        self._left -= count
        return count


def conditions(offset: int, length: int | None, etag: str | None) -> dict[str, str]:
    """Return the headers that ask for a range of an object, and for none other than the one with this etag."""
    ranged = {"Range": f"bytes={offset}-" + ("" if length is None else str(offset + length - 1))}
    return (ranged if offset or length is not None else {}) | ({"If-Match": f'"{etag}"'} if etag is not None else {})


def range_bytes(key: str, answer: OpenAnswer, offset: int, *, ranged: bool) -> int:
    """Return how many bytes the answer holds; those asked for, not others."""
    begins = answer.headers.get("content-range", "").removeprefix("bytes ").partition("-")[0]
    if ranged and offset and begins != str(offset):
        raise StoreUnavailable(
            f"{key}: asked for bytes from {offset} on, the store answered {answer.status} from {begins or 0} on"
        )
    return int(answer.headers.get("content-length", 0))


def _success(answer: OpenAnswer, operation: str) -> OpenAnswer:
    if answer.status >= 300:
        raise client_error(whole(answer, MAX_ERROR_BYTES), operation)
    return answer


def _accepted(answer: Answer, operation: str) -> Answer:
    if answer.status >= 300:
        raise client_error(answer, operation)
    return answer


def _etag(answer: Answer) -> str:
    return answer.headers.get("etag", "")


def client_error(answer: Answer, operation: str) -> ClientError:
    """Return what boto3 would raise for an answer that is no success."""
    said: dict[str, str] = {}
    with suppress(ResponseParserError):
        said = texts(parsed(answer.content, "Error"))
    answered: Any = {
        "Error": {"Code": said.pop("Code", str(answer.status))} | said,
        "ResponseMetadata": {"HTTPStatusCode": answer.status, "HTTPHeaders": dict(answer.headers)},
    }
    return ClientError(answered, operation)
