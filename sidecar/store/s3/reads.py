"""Reads of objects: checks that an answer is the requested range, and requests the rest after a connection goes silent."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from sidecar.errors import AlreadyExists, CorruptObject, StoreUnavailable
from sidecar.store.protocol import Readable, Stored
from sidecar.store.s3.answers import OpenBody, object_bytes, plain_etag
from sidecar.store.s3.bodies import Incoming, conditions
from sidecar.store.s3.client import Clients
from sidecar.store.s3.errors import translated


def same_object(there: Stored, etag: str) -> Stored:
    """Return an object as it was listed.

    Raises:
        CorruptObject: It does not have this etag.
    """
    if there.etag != etag:
        raise CorruptObject(there.key, want=f"etag {etag}", got=f"etag {there.etag}")
    return there


class Reads:
    """Reads the objects below ``root``. Thread-safe."""

    def __init__(self, clients: Clients, stat: Callable[[str], Stored], *, root: str, url: str) -> None:
        """Take what requests go through. ``stat``: that of the store; ``root``: prefix of its keys; ``url``: its name."""
        self._clients = clients
        self._stat = stat
        self._root = root
        self._url = url

    @contextmanager
    def read(self, key: str, *, offset: int, length: int | None, etag: str | None) -> Iterator[Readable]:
        """Open an object, as ``Store.read``."""
        if (length == 0 or (length is None and offset)) and self._ends_at(key, offset, length, etag):
            yield io.BytesIO()
            return
        with self._asked(key, offset, length, etag) as answered:
            yield answered()

    @contextmanager
    def reading(self, key: str, *, length: int) -> Iterator[Callable[[], Readable]]:
        """Request the beginning of an object, as ``Store.reading``."""
        if length:
            with self._asked(key, 0, length, None) as answered:
                yield answered
        else:
            with self.read(key, offset=0, length=0, etag=None) as body:
                yield lambda: body

    @contextmanager
    def _asked(self, key: str, offset: int, length: int | None, etag: str | None) -> Iterator[Callable[[], Readable]]:
        with ExitStack() as asked:
            with self._clients.translated(f"{self._url}/{key}"):
                answered = asked.enter_context(
                    self._clients.current().bodies.getting(self._root + key, conditions(offset, length, etag))
                )
            yield lambda: self._opened(key, answered, offset, length, etag, asked)

    def _opened(
        self, key: str, answered: Callable[[], OpenBody], offset: int, length: int | None, etag: str | None, opened: ExitStack
    ) -> Readable:
        try:
            with self._clients.translated(f"{self._url}/{key}"):
                answer = answered()
        except AlreadyExists:  # the precondition failed
            raise CorruptObject(key, want=f"etag {etag}", got="the object was replaced") from None
        there = object_bytes(f"{self._url}/{key}", answer, offset, length)
        if (length is not None and (there or 0) < length) or (there is None and not answer.is_chunked):
            # A shorter length may be that of another server's page; the listing has the object's true size.
            size_bytes = self._seen(key, etag).size_bytes
            if size_bytes < offset + (length or 0):
                raise CorruptObject(key, want=f"at least {offset + (length or 0)} bytes", got=f"{size_bytes} bytes")
            if there is not None:
                raise StoreUnavailable(f"{self._url}/{key}: {there} of {size_bytes - offset} bytes came; it is tried again")
            there = size_bytes - offset
        wanted = there if length is None else length

        def rest(left: int, silences: int) -> OpenBody:
            return self._rest(key, answer, offset + (wanted or 0) - left, left, silences, opened)

        return Incoming(f"{self._url}/{key}", answer, left=wanted, rest=rest)

    def _rest(self, key: str, before: OpenBody, offset: int, length: int, silences: int, opened: ExitStack) -> OpenBody:
        """Request the missing rest of a read, of the same version of the object."""
        etag = plain_etag(before.headers.get("etag", ""))
        same, name = conditions(offset, length, etag or None), f"{self._url}/{key}"
        try:
            with translated(name):
                answer = opened.enter_context(
                    self._clients.current().bodies.getting(self._root + key, same, silences=silences)
                )()
        except AlreadyExists:  # the precondition failed
            raise CorruptObject(key, want=f"etag {etag}", got="the object was replaced") from None
        there = object_bytes(name, answer, offset, length)
        if there is not None and there < length:
            raise StoreUnavailable(f"{name}: {there} of the last {length} bytes came; it is tried again")
        return answer

    def _seen(self, key: str, etag: str | None) -> Stored:
        return self._stat(key) if etag is None else same_object(self._stat(key), etag)

    def _ends_at(self, key: str, offset: int, length: int | None, etag: str | None) -> bool:
        """Whether the range is empty. Such a read sends no request: stores refuse an empty range, or send the whole object."""
        there = self._seen(key, etag)
        if there.size_bytes < offset:
            raise CorruptObject(key, want=f"at least {offset} bytes", got=f"{there.size_bytes} bytes")
        return length == 0 or there.size_bytes == offset
