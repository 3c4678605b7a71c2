"""Bodies of objects: sent and received from worker threads, over the wire or, for comparison, by boto3 (``boto_bodies``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import structlog

from sidecar.errors import StoreUnavailable
from sidecar.store.http.answer import OpenAnswer
from sidecar.store.http.exchange import sent
from sidecar.store.http.link import Silent
from sidecar.store.http.wire import Wire, whole
from sidecar.store.s3.answers import OpenBody, check_object, client_error, etag_of_write, is_success
from sidecar.store.s3.errors import translated
from sidecar.store.s3.signing import Signer
from sidecar.store.slice import FileSlice

log = structlog.get_logger()

Fields = Mapping[str, str]
Query = Mapping[str, str | int] | None

MOST_SILENCES = 5
"""Maximum connections in a row that bring no byte of a body; the wait doubles with each."""


class BodyRequests(Protocol):
    """Requests with bodies. Keys include the store's prefix; raises botocore's errors and those of HTTP."""

    def putting(
        self, key: str, body: FileSlice, *, headers: Fields, sha256: str, query: Query = None
    ) -> AbstractContextManager[Callable[[], str]]:
        """Send an object, or the part that ``query`` names; the function yielded waits for the answer and returns the etag."""
        ...

    def getting(self, key: str, headers: Fields, *, silences: int = 0) -> AbstractContextManager[Callable[[], OpenBody]]:
        """Request an object, or the range in ``headers``; the function yielded waits for the answer's head.

        ``silences``: connections that already fell silent with this request.
        """
        ...

    def close(self) -> None:
        """Abort requests in flight."""
        ...


class WireRequests:
    """Bodies over our own wire."""

    def __init__(self, signer: Signer, wire: Wire) -> None:
        self._signer = signer
        self._wire = wire

    @contextmanager
    def putting(  # noqa: D102
        self, key: str, body: FileSlice, *, headers: Fields, sha256: str, query: Query = None
    ) -> Iterator[Callable[[], str]]:
        operation = "UploadPart" if query else "PutObject"
        request = self._signer.request("PUT", key, query=query, headers=headers, body=body, sha256=sha256, kind=operation)
        with sent(self._wire, request) as answered:
            yield lambda: _etag(answered(), operation)

    @contextmanager
    def getting(self, key: str, headers: Fields, *, silences: int = 0) -> Iterator[Callable[[], OpenBody]]:  # noqa: D102
        request = self._signer.request("GET", key, headers=headers, kind="GetObject", silences=silences)
        with sent(self._wire, request) as answered:
            yield lambda: _object(answered(), key)

    def close(self) -> None:  # noqa: D102
        self._wire.close()


def _etag(answered: OpenAnswer, operation: str) -> str:
    answer = whole(answered)
    if not is_success(answer.status, operation):
        raise client_error(answer.status, answer.headers, answer.content, operation)
    return etag_of_write(answer.headers, answer.content, operation)


def _object(answer: OpenAnswer, key: str) -> OpenAnswer:
    if not is_success(answer.status, "GetObject"):
        raise client_error(answer.status, answer.headers, whole(answer).content, "GetObject")
    check_object(answer.headers, key)
    return answer


class Incoming:
    """Body of a download. A premature end raises; after a silent connection, the rest is requested again."""

    def __init__(self, name: str, stream: OpenBody, *, left: int | None, rest: Callable[[int, int], OpenBody]) -> None:
        """Wrap an answer whose body is not read yet.

        Args:
            name: Name of the object, for error texts.
            stream: The answer to read from.
            left: Length of the body in bytes; ``None``: unknown, the answer is chunked.
            rest: Requests the rest of the body; takes the missing bytes and the number of connections that fell silent.
        """
        self._name = name
        self._stream = stream
        self._left = left
        self._rest = rest
        self._silences = 0

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill the beginning of ``buffer`` and return the count; 0 only at EOF.

        Raises:
            StoreUnavailable: The answer ended prematurely.
        """
        if self._left == 0:
            return 0
        with translated(self._name):
            count = self._received(buffer if self._left is None else buffer[: min(len(buffer), self._left)])
        if self._left is not None:
            self._left -= count
        if not count and not (self._left is None and self._stream.is_whole):
            early = "" if self._left is None else f"{self._left} bytes "
            raise StoreUnavailable(f"{self._name}: the answer ended {early}early; it is tried again")
        self._silences = 0
        return count

    def _received(self, room: memoryview) -> int:
        while True:
            try:
                return self._stream.readinto(room)
            except Silent as silent:
                self._silences += 1
                if self._left is None or self._silences > MOST_SILENCES:
                    raise
                waited_s = round(silent.seconds, 2)
                log.info("store_connection_silent", object=self._name, left_bytes=self._left, silent_s=waited_s)
                self._stream = self._rest(self._left, self._silences)


def conditions(offset: int, length: int | None, etag: str | None) -> dict[str, str]:
    """Return the Range and If-Match headers of a read. ``length`` ``None``: to the end; ``etag`` ``None``: any version."""
    ranged = {"Range": f"bytes={offset}-" + ("" if length is None else str(offset + length - 1))}
    return (ranged if offset or length is not None else {}) | ({"If-Match": f'"{etag}"'} if etag is not None else {})
