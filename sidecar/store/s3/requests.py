"""Signed requests to an S3 server over the HTTP transport: bodies of objects, small documents, listings."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import structlog

from sidecar.errors import StoreUnavailable
from sidecar.store.http.answer import OpenAnswer
from sidecar.store.http.wire import MAX_ANSWER_BYTES, Answer, AnswerTooLong, Request, Silent, whole
from sidecar.store.s3.answers import accepted, check_object, client_error, etag_of_write
from sidecar.store.s3.client import AGAIN, AGAIN_IN_S, Access
from sidecar.store.s3.errors import translated
from sidecar.store.s3.signing import UNSIGNED
from sidecar.store.slice import FileSlice

log = structlog.get_logger()

MOST_SILENCES = 5
"""Maximum connections in a row that bring no byte of a body; the wait doubles with each."""


class S3Requests:
    """Sends requests with and without bodies; raises ``ClientError`` where boto3 would."""

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
        """Send an object or a part; the function yielded waits for the answer and returns the etag."""
        access = self._access()
        request = access.signer.request("PUT", key, query=query, headers=headers, body=body, sha256=sha256, kind=operation)
        with access.wire.sent(request) as answered:
            yield lambda: etag_of_write(accepted(whole(answered()), operation), operation)

    def put_document(self, key: str, content: bytes, *, headers: Mapping[str, str]) -> str:
        """Send a small object, with its hash in the signature, and return its etag. A 5xx is retried once."""
        return etag_of_write(self.ask("PUT", key, operation="PutObject", headers=headers, content=content), "PutObject")

    @contextmanager
    def getting(self, key: str, headers: Mapping[str, str], *, silences: int = 0) -> Iterator[Callable[[], OpenAnswer]]:
        """Request an object, or the range in ``headers``; the function yielded waits for the answer's head."""
        access = self._access()
        request = access.signer.request("GET", key, headers=headers, kind="GetObject", silences=silences)
        with access.wire.sent(request) as answered:
            yield lambda: _object(answered(), key)

    def get_document(self, key: str, *, most_bytes: int) -> Answer | None:
        """Return a small object, or ``None`` if it is larger than ``most_bytes``. A 5xx is retried once."""
        try:
            answer = self.ask("GET", key, operation="GetObject", most_bytes=most_bytes)
        except AnswerTooLong as error:
            check_object(error.headers, key)
            return None
        if answer.status != 200:
            raise client_error(answer, "GetObject")
        check_object(answer.headers, key)
        return answer

    def list_objects(self, query: Mapping[str, str]) -> bytes:
        """Return the body of the answer to a ListObjectsV2 query. A 5xx is retried once."""
        return self.ask("GET", "", operation="ListObjectsV2", query=query).content

    def ask(
        self,
        method: str,
        key: str,
        *,
        operation: str,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
        most_bytes: int = MAX_ANSWER_BYTES,
        within_s: float | None = None,
        unwanted: Callable[[OpenAnswer], object] | None = None,
    ) -> Answer:
        """Send a small request, with its hash in the signature. A 5xx is retried once.

        A late request is hedged, unless it has a deadline (``within_s``, seconds). ``unwanted`` is called in a background
        thread with the second answer to a hedged request.

        Raises:
            AnswerTooLong: The answer has more than ``most_bytes``.
        """
        access = self._access()
        sha256 = UNSIGNED if content is None else hashlib.sha256(content).hexdigest()

        def made() -> Request:
            return access.signer.request(
                method,
                key,
                query=query,
                headers=headers,
                body=content,
                sha256=sha256,
                kind=operation,
                within_s=within_s,
                unwanted=unwanted,
            )

        answer = access.wire.exchange(made(), most_bytes)
        if answer.status in AGAIN:
            time.sleep(AGAIN_IN_S)
            answer = access.wire.exchange(made(), most_bytes)
        return accepted(answer, operation)


class Incoming:
    """Body of a download. A premature end raises; after a silent connection, the rest is requested again."""

    def __init__(self, name: str, stream: OpenAnswer, *, left: int | None, rest: Callable[[int, int], OpenAnswer]) -> None:
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


def _object(answer: OpenAnswer, key: str) -> OpenAnswer:
    if answer.status not in (200, 206):
        raise client_error(whole(answer), "GetObject")
    check_object(answer.headers, key)
    return answer
