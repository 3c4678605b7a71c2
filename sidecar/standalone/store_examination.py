"""Examination of a store for ``doctor``: every request that a run makes is tried once, below ``.ckpt-probe/``."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from sidecar.core.format import keys
from sidecar.core.lifecycle.fencing import seconds_of
from sidecar.core.planning.store_diagnosis import DENIED_CODES, NEEDS, Operation, StoreFacts, Tried, Trouble, trouble_of_code
from sidecar.errors import (
    AccessRefused,
    ConfigurationError,
    CorruptObject,
    NoCredentials,
    NotFound,
    SettingRequired,
    StoreError,
    StoreUnavailable,
    UntrustedStore,
)
from sidecar.standalone.session import StoreSession
from sidecar.standalone.transfer_rate import RateMeasurement
from sidecar.store.protocol import Part, Stored
from sidecar.store.slice import FileSlice, slice_of

T = TypeVar("T")

CONTENT = b"checkpoint-sidecar doctor\n"


class StoreExamination:
    """Examines one store and deletes all that it wrote. What a kill leaves, a later probe deletes once it is an hour old."""

    def __init__(self, session: StoreSession) -> None:
        self._session = session
        self._store = session.store
        self._base = f"{keys.PROBE}{uuid.uuid4().hex}"
        self._tried: list[Tried] = []
        self._written: set[str] = set()
        self._uploads: set[tuple[str, str]] = set()
        self._rate = RateMeasurement(session, self._base, self._written)

    async def run(self) -> StoreFacts:
        """Return what was found; errors of the store are facts, too."""
        endpoint = self._session.settings.endpoint_url or "https://"
        facts = StoreFacts(
            self._store.url,
            is_encrypted=endpoint.startswith("https:") if self._session.is_remote else None,
            verifies_tls=self._session.settings.verify_tls,
        )
        executor = self._session.executor
        try:
            facts = await self._examined(facts)
        except StoreError as error:
            facts = replace(facts, trouble=(_trouble(error), str(error)))
        except ConfigurationError as error:  # CKPT_VERIFY=md5, and the store has none
            facts = replace(facts, trouble=(Trouble.ACCESS, str(error)))
        finally:
            left = await executor.once(self._clean)
        return replace(facts, tried=tuple(self._tried), left_behind=left)

    async def _examined(self, facts: StoreFacts) -> StoreFacts:
        executor = self._session.executor
        await executor.persistently(self._try_access)
        if Operation.DELETE in self._failed():
            return facts  # what cannot be deleted is not written
        skew_s = await executor.once(self._try_all)
        if Operation.PUT in self._failed():
            await executor.once(self._find_required_setting)
        if any(NEEDS[operation].is_vital for operation in self._failed()):
            return facts  # the probe needs them all
        found = await self._session.probe()
        facts = replace(
            facts,
            skew_s=skew_s,
            verification=found.verification.value,
            conditional_put=found.conditional_put,
            round_trip_s=found.round_trip_s,
            ends_with_container=found.ends_with_container,
            is_encrypted=found.is_encrypted,
        )
        try:
            up, down = await self._rate.measure()
        except StoreError as error:
            return replace(facts, rate_error=str(error), is_rate_refused=isinstance(error, AccessRefused))
        return replace(facts, up_bytes_per_s=up, down_bytes_per_s=down)

    def _try_access(self) -> None:
        """Try the two operations that write nothing.

        Raises:
            StoreError: The store cannot be reached, or refuses all access.
        """
        self._tried.clear()
        if not self._session.is_remote:
            self._store.probe()  # makes the folder, as the sidecar does
        try:
            self._try(Operation.LIST, lambda: list(self._store.list(f"{self._base}/")))
        except AccessRefused:
            self._store.probe()  # some servers have another form of addresses, which the probe finds
            self._try(Operation.LIST, lambda: list(self._store.list(f"{self._base}/")))
        self._try(Operation.DELETE, lambda: self._store.delete([f"{self._base}/none"]))

    def _try_all(self) -> float | None:
        """Try the operations that write. Returns the skew of the clocks in seconds; ``None``: unknown."""
        with slice_of(CONTENT, name="doctor") as body:
            key = self._wrote("object")
            began_s = time.time()
            stored = self._try(Operation.PUT, lambda: self._store.put_file(key, body))
            ended_s = time.time()
            if stored is None:
                return None
            self._try(Operation.GET, lambda: self._got(key))
            self._try_multipart(body)
            if Operation.LIST in self._failed():
                return None
            etag = stored.etag
            self._try(Operation.COPY, lambda: self._store.copy(key, self._wrote("copy"), etag=etag))
            there = next((found for found in self._store.list(key) if found.key == key), None)
            return _skew_s(there, began_s, ended_s) if there is not None and self._session.is_remote else None

    def _find_required_setting(self) -> None:
        """Raise ``SettingRequired`` if a setting is what a denied write lacks."""
        try:
            self._store.probe()
        except SettingRequired:
            raise
        except StoreError:
            pass  # the permissions say it

    def _try_multipart(self, body: FileSlice) -> None:
        store, key, other = self._store, self._wrote("joined"), self._wrote("aborted")
        upload = self._try(Operation.BEGIN, lambda: store.begin_upload(key))
        if upload is None:
            return
        self._uploads.add((key, upload))
        part = self._try(Operation.PART, lambda: store.upload_part(key, upload, 1, body))
        self._try(Operation.LIST_PARTS, lambda: list(store.list_parts(key, upload)))
        self._try(Operation.LIST_UPLOADS, lambda: list(store.pending_uploads(key)))
        if part is not None:
            self._complete(Operation.COMPLETE, key, upload, part, body)
        try:
            second = store.begin_upload(other)
        except AccessRefused:  # it was allowed a moment ago: whether uploads can be aborted is not known
            return
        self._uploads.add((other, second))
        self._try(Operation.ABORT, lambda: store.abort_upload(other, second))
        if self._tried[-1].error is None:
            self._uploads.discard((other, second))
        elif part is not None:  # it becomes an object, which can be deleted
            self._complete(None, other, second, store.upload_part(other, second, 1, body), body)

    def _complete(self, operation: Operation | None, key: str, upload: str, part: Part, body: FileSlice) -> None:
        def complete() -> Stored:
            stored = self._store.complete_upload(key, upload, [part], crc64nvme=body.crc64nvme)
            self._uploads.discard((key, upload))
            return stored

        if operation is not None:
            self._try(operation, complete)
        else:
            with suppress(StoreError):
                complete()

    def _got(self, key: str) -> bytes:
        content = self._store.get(key)
        if content != CONTENT:
            raise CorruptObject(key, want="what was written", got="the store returned something else")
        return content

    def _try(self, operation: Operation, call: Callable[[], T]) -> T | None:
        """Record the result of an operation, and return it; ``None``: it failed.

        Raises:
            StoreUnavailable, CorruptObject: As the call does.
            AccessRefused: The store refuses all access, not this operation.
        """
        try:
            result = call()
        except AccessRefused as refused:
            is_denied = refused.code in DENIED_CODES
            if not is_denied and (not self._tried or trouble_of_code(refused.code) is not Trouble.ACCESS):
                raise
            self._tried.append(Tried(operation, str(refused), is_denied=is_denied))
            return None
        except (StoreUnavailable, CorruptObject):
            raise
        except StoreError as error:
            self._tried.append(Tried(operation, str(error)))
            return None
        self._tried.append(Tried(operation))
        return result

    def _failed(self) -> set[Operation]:
        return {tried.operation for tried in self._tried if tried.error is not None}

    def _wrote(self, name: str) -> str:
        """Return a key that is deleted at the end."""
        key = f"{self._base}-{name}"
        self._written.add(key)
        return key

    def _clean(self) -> tuple[str, ...]:
        """Delete all that was written. Returns what stays. Blocks."""
        self._rate.end()
        unfinished = []
        for key, upload in sorted(self._uploads):
            try:
                self._store.abort_upload(key, upload)
            except NotFound:
                continue
            except StoreError:
                unfinished.append(f"{key} (an unfinished upload)")
        return (*unfinished, *self._objects_left())

    def _objects_left(self) -> list[str]:
        if not self._written:
            return []
        try:
            self._store.delete(sorted(self._written))
        except StoreError:
            with suppress(StoreError):
                return [found.key for found in self._store.list(self._base)]
            return sorted(self._written)
        return []


def _trouble(error: StoreError) -> Trouble:
    match error:
        case UntrustedStore():
            return Trouble.TLS
        case NoCredentials():
            return Trouble.CREDENTIALS
        case SettingRequired():
            return Trouble.POLICY
        case AccessRefused():
            return trouble_of_code(error.code)
        case CorruptObject():
            return Trouble.INTEGRITY
        case _:
            return Trouble.REACH


def _skew_s(stored: Stored, began_s: float, ended_s: float) -> float | None:
    """Return this clock minus the store's, from the time of a write; 0 within its uncertainty, the request and a second."""
    if (at_s := seconds_of(stored.modified)) is None:
        return None
    if at_s < began_s - 1:
        return began_s - 1 - at_s
    return min(0.0, ended_s - at_s)
