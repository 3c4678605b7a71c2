"""Objects' bodies, and what else is read, on their way to and from an S3 server: one signed request each, over the wire."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from xml.etree import ElementTree

from botocore.exceptions import ClientError

from sidecar.errors import StoreUnavailable
from sidecar.store.s3_client import AGAIN, AGAIN_IN_S, Access
from sidecar.store.s3_errors import translated
from sidecar.store.s3_signing import UNSIGNED
from sidecar.store.slice import FileSlice
from sidecar.store.wire import Answer
from sidecar.store.wire_answer import OpenAnswer


class Bodies:
    """Sends and fetches; raises ``ClientError`` where boto3 would."""

    def __init__(self, access: Callable[[], Access]) -> None:
        self._access = access

    def put(
        self,
        key: str,
        body: FileSlice,
        *,
        operation: str,
        query: Mapping[str, str | int] | None = None,
        headers: Mapping[str, str] | None = None,
        sha256: str = UNSIGNED,
    ) -> str:
        """Send an object or a part and return its etag."""
        access = self._access()
        request = access.signer.request("PUT", key, query=query, headers=headers, body=body, sha256=sha256)
        answer = access.wire.exchange(request)
        if answer.status >= 300:
            raise client_error(answer, operation)
        return answer.headers.get("etag", "")

    @contextmanager
    def get(self, key: str, headers: Mapping[str, str]) -> Iterator[OpenAnswer]:
        """Open an object, or the range that the headers name."""
        access = self._access()
        with access.wire.fetch(access.signer.request("GET", key, headers=headers)) as answer:
            if isinstance(answer, Answer):
                raise client_error(answer, "GetObject")
            yield answer

    def read(self, key: str = "", *, operation: str, query: Mapping[str, str] | None = None) -> bytes:
        """Return a small object, or what the bucket answers to a query. A lone 5xx gets a second try, as with boto3."""
        access = self._access()
        for again in (True, False):
            answer = access.wire.exchange(access.signer.request("GET", key, query=query))
            if not (again and answer.status in AGAIN):
                break
            time.sleep(AGAIN_IN_S)
        if answer.status >= 300:
            raise client_error(answer, operation)
        return answer.content


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


def client_error(answer: Answer, operation: str) -> ClientError:
    """Return what boto3 would raise for an answer that is no success."""
    said: dict[str, str] = {}
    with suppress(ElementTree.ParseError):
        said = {_name(child.tag): child.text or "" for child in ElementTree.fromstring(answer.content)}  # noqa: S314
    parsed: Any = {
        "Error": {"Code": said.pop("Code", str(answer.status))} | said,
        "ResponseMetadata": {"HTTPStatusCode": answer.status, "HTTPHeaders": dict(answer.headers)},
    }
    return ClientError(parsed, operation)


def _name(tag: str) -> str:
    return tag.rpartition("}")[2]  # without the namespace
