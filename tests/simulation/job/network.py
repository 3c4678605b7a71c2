"""The store as one life of a sidecar reaches it: requests are lost, repeated, answered with errors, and outlive it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from sidecar.core.format.manifest import MAX_DOCUMENT_BYTES
from sidecar.errors import AlreadyExists, NotFound, StoreError, StoreUnavailable
from sidecar.store.protocol import Capabilities, Part, PendingUpload, Readable, Stored
from sidecar.store.slice import FileSlice
from tests.simulation.job.loop import Process
from tests.simulation.job.store import JobStore
from tests.simulation.job.world import GIVEN_UP_AFTER_S, Killed, World
from tests.store.memory import _read_all

T = TypeVar("T")


class PodStore:
    """Implements ``sidecar.store.protocol.Store``."""

    def __init__(self, world: World, process: Process, store: JobStore, *, cut_off: tuple[float, float]) -> None:
        self.url, self.key_limits = store.url, store.key_limits
        self._world = world
        self._process = process
        self._store = store
        self._cut_off = cut_off
        """From when until when nothing of this pod gets through."""

    def _request(self, call: Callable[[], T], *, writes: bool = False) -> T:
        world, loop, faults = self._world, self._world.loop, self._world.faults
        draw = world.random.random
        if world.calls:
            loop.skew_s += 0.02 + 0.06 * draw()
        world.calls += 1
        if self._process.is_dead:
            if world.calls == 1:
                call()  # it was on its way
            raise Killed
        luck = draw()
        if luck < faults.lost or self._cut_off[0] <= loop.now_s < self._cut_off[1]:
            loop.skew_s += GIVEN_UP_AFTER_S
            raise StoreUnavailable("no answer")
        if writes and luck > 1 - faults.repeated:
            loop.call_at(loop.now_s + faults.repeated_s * draw(), self._again, call, world.issued_s)
        if luck >= faults.lost + faults.unanswered:
            return call()
        with suppress(StoreError):
            call()
        world.counts["unanswered"] += 1
        raise StoreUnavailable("500 after the fact")

    def _again(self, call: Callable[[], Any], issued_s: float) -> None:
        world = self._world
        world.acting, world.issued_s, world.is_stray = self._process, issued_s, True
        try:
            call()
        except StoreError:
            pass
        finally:
            world.acting, world.is_stray = None, False

    # Reading.

    def probe(self) -> Capabilities:
        return self._request(self._store.probe)

    def get(self, key: str, *, most_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        return self._request(lambda: self._store.get(key, most_bytes=most_bytes))

    def stat(self, key: str) -> Stored:
        return self._request(lambda: self._store.stat(key))

    def list(self, prefix: str) -> Iterator[Stored]:
        return self._request(lambda: self._store.list(prefix))

    def list_folders(self) -> Iterator[str]:
        return self._request(self._store.list_folders)

    def pending_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        return self._request(lambda: self._store.pending_uploads(prefix))

    def list_parts(self, key: str, upload_id: str) -> Iterator[Part]:
        return self._request(lambda: self._store.list_parts(key, upload_id))

    @contextmanager
    def read(self, key: str, *, offset: int = 0, length: int | None = None, etag: str | None = None) -> Iterator[Readable]:
        with self._request(lambda: self._store.read(key, offset=offset, length=length, etag=etag)) as body:
            yield body

    @contextmanager
    def reading(self, key: str, *, length: int) -> Iterator[Callable[[], Readable]]:
        with self.read(key, length=length) as body:
            yield lambda: body

    # Writing.

    def put(self, key: str, content: bytes, *, only_if_absent: bool = False) -> Stored:
        def put() -> Stored:
            try:
                return self._store.put(key, content, only_if_absent=only_if_absent)
            except AlreadyExists:  # as the store of S3 does: perhaps our own, whose answer was lost
                if self._store.contents.get(key) != content:
                    raise
                return self._store.stat(key)

        return self._request(put, writes=True)

    def delete(self, keys: Iterable[str]) -> None:
        gone = list(keys)
        return self._request(lambda: self._store.delete(gone), writes=True)

    def put_file(self, key: str, body: FileSlice, *, only_if_absent: bool = False) -> Stored:
        content = _read_all(body)
        return self._request(lambda: self._store.put(key, content, only_if_absent=only_if_absent), writes=True)

    @contextmanager
    def putting_file(self, key: str, body: FileSlice, *, only_if_absent: bool = False) -> Iterator[Callable[[], Stored]]:
        yield lambda: self.put_file(key, body, only_if_absent=only_if_absent)

    def copy(self, source: str, target: str, *, etag: str) -> Stored:
        return self._request(lambda: self._store.copy(source, target, etag=etag), writes=True)

    def begin_upload(self, key: str) -> str:
        upload_id = self._request(lambda: self._store.begin_upload(key), writes=True)
        self._store.known_uploads[upload_id] = self._process
        return upload_id

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> Part:
        content = _read_all(body)
        return self._request(lambda: self._store.write_part(key, upload_id, number, content), writes=True)

    def complete_upload(self, key: str, upload_id: str, parts: Iterable[Part], *, crc64nvme: int) -> Stored:
        chosen = list(parts)

        def complete() -> Stored:
            try:
                return self._store.complete_upload(key, upload_id, chosen, crc64nvme=crc64nvme)
            except NotFound:  # as the store of S3 does: perhaps completed before, by a try whose answer was lost
                if (stored := self._store.completed(key, upload_id)) is None:
                    raise
                return stored

        return self._request(complete, writes=True)

    def abort_upload(self, key: str, upload_id: str) -> None:
        try:
            self._request(lambda: self._store.abort_upload(key, upload_id), writes=True)
        except StoreError:  # tried once: the look for orphans a day later, or the bucket's lifecycle rule, finds it
            self._store.known_uploads.pop(upload_id, None)
            raise

    def hurry(self, hurried: bool) -> None:
        return

    def close(self) -> None:
        return
