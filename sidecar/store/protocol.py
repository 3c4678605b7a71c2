"""Protocol of object stores: the operations that S3 and a folder implement; in tests also a store in memory.

All calls block and are made from worker threads, concurrently. Keys are relative to the store's root
(``checkpoint-20/model.safetensors``). All failures are ``StoreError`` of ``sidecar.errors``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from sidecar.core.format.key_limits import KeyLimits
from sidecar.core.format.manifest import MAX_DOCUMENT_BYTES
from sidecar.store.slice import FileSlice


class Verification(Enum):
    """How an upload is verified: that the store holds the bytes that were sent."""

    STORE_CRC = "store-crc"
    """The store verifies our CRC64NVME of the whole object; the start-up probe saw it refuse a wrong one."""
    SIGNED_SHA256 = "signed-sha256"
    """The store verifies the SHA-256 that each request signs; the start-up probe saw it refuse a wrong one."""
    MD5 = "md5"
    """The store's etags are MD5s of the bytes received; the sidecar compares them."""
    READ_BACK = "read-back"
    """The store verifies nothing: the sidecar reads each object back and compares its CRC64NVME."""
    FSYNC = "fsync"
    """A file system: the kernel confirmed write and fsync."""
    OFF = "off"
    """``CKPT_VERIFY=off``: uploads are not verified, only downloads."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Capabilities of a store, as the start-up probe found them."""

    verification: Verification
    conditional_put: bool
    """The store itself refuses ``put(only_if_absent=True)`` for an existing object (compare-and-set)."""
    min_part_bytes: int
    max_parts: int
    conditional_files: bool = False
    """The store itself refuses ``put_file(only_if_absent=True)`` for an existing object."""
    round_trip_s: float | None = None
    """Round trip of a small request in seconds, the slower of a read and a write; ``None``: the store is not remote."""
    ends_with_container: bool = False
    """It is a folder on the container's own file system, which is deleted with the container."""
    is_encrypted: bool | None = None
    """It is reached by https; ``None``: it is not remote."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One object as the store lists it. ``etag`` is opaque and changes when the object is replaced by other content."""

    key: str
    size_bytes: int
    etag: str
    modified: str = field(default="", compare=False)
    """Time of the write by the store's clock, as text that sorts chronologically. Only of listed objects; empty: unknown."""


@dataclass(frozen=True, slots=True)
class Part:
    """One stored part of an unfinished upload. ``number`` counts from 1."""

    number: int
    size_bytes: int
    etag: str
    stored_at_s: float = field(default=0.0, compare=False)
    """Time of a listed part by the store's clock, epoch seconds; 0: unknown."""
    crc64nvme: int | None = field(default=None, compare=False)
    """Checksum of its bytes; ``None``: unknown."""


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """A multipart upload that was created and neither completed nor aborted."""

    key: str
    upload_id: str
    begun_at_s: float = field(default=0.0, compare=False)
    """Time of its creation by the store's clock, epoch seconds; 0: unknown."""
    listed_at_s: float = field(default=0.0, compare=False)
    """Time of the listing by the same clock, epoch seconds; 0: unknown."""


class Readable(Protocol):
    """An open object body."""

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill the beginning of ``buffer`` and return the count; 0 at EOF."""
        ...


class Store(Protocol):
    """An object store, see the module's docstring."""

    @property
    def url(self) -> str:
        """``s3://bucket/prefix``, ``file:///path`` or ``memory://name``, without credentials."""
        ...

    @property
    def key_limits(self) -> KeyLimits:
        """What it takes as a key. Known without contacting it."""
        ...

    def probe(self) -> Capabilities:
        """Write, read, list and delete under ``.ckpt-probe/``; determine the store's capabilities, and remember them.

        Raises:
            AccessRefused: The text names the cause (bucket, credentials, permission, TLS, clock) and the remedy.
            StoreUnavailable: The store did not answer.
        """
        ...

    def get(self, key: str, *, most_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        """Return the content of a small object.

        Raises:
            NotFound: There is no such object.
            OversizedDocument: It is larger than ``most_bytes``; it is not read.
        """
        ...

    def put(self, key: str, content: bytes, *, only_if_absent: bool = False) -> Stored:
        """Write a small object atomically.

        Raises:
            AlreadyExists: ``only_if_absent``, and the object exists. An object with equal content may count as our own write
                whose answer was lost. Best effort where ``conditional_put`` is false.
        """
        ...

    def stat(self, key: str) -> Stored:
        """Return size and etag of an object.

        Raises:
            NotFound: There is no such object.
        """
        ...

    def list(self, prefix: str) -> Iterator[Stored]:
        """Yield every object whose key begins with ``prefix``, in order of key."""
        ...

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        """Yield folder names: the first segments of all keys with several, such as ``checkpoint-20``.

        ``prefix``: only those below a folder, whose name ends with ``/``.
        """
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; missing ones are not an error. The order is arbitrary: call twice where it matters."""
        ...

    def put_file(self, key: str, body: FileSlice, *, only_if_absent: bool = False) -> Stored:
        """Write an object from a file in one request, verified by ``Capabilities.verification``.

        Afterwards, ``body.crc64nvme`` is the checksum of the bytes sent. ``READ_BACK`` is left to the caller, which alone knows
        the whole object.

        Raises:
            AlreadyExists: ``only_if_absent``, and the object exists; it is unchanged. It may be our own, written by an earlier
                try whose answer was lost. Only where ``conditional_files`` is true; elsewhere ``only_if_absent`` is ignored.
            CorruptObject: The store received other bytes; the object is removed.
            Stopped: The body's gate was closed.
        """
        ...

    def putting_file(
        self, key: str, body: FileSlice, *, only_if_absent: bool = False
    ) -> AbstractContextManager[Callable[[], Stored]]:
        """Send the request of ``put_file``; the function yielded waits for the answer, and returns or raises as ``put_file``.

        Other requests can be sent meanwhile. If the context ends without that call, the outcome is unknown.
        """
        ...

    def copy(self, source: str, target: str, *, etag: str) -> Stored:
        """Copy an object inside the store, without downloading it.

        Raises:
            NotFound: There is no ``source``.
            CorruptObject: ``source`` was replaced: it does not have the given ``etag``.
        """
        ...

    def begin_upload(self, key: str) -> str:
        """Create a multipart upload and return its id."""
        ...

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> Part:
        """Send one part. Sending the same number again replaces it. Raises as ``put_file``.

        Raises:
            NotFound: The upload was aborted or completed.
        """
        ...

    def complete_upload(self, key: str, upload_id: str, parts: Iterable[Part], *, crc64nvme: int) -> Stored:
        """Complete an upload: join its parts, in order of number, into the object.

        Raises:
            NotFound: The upload was aborted, or completed with other parts. After a lost answer the call may be repeated if
                the store's etags identify the object (S3 without KMS).
            CorruptObject: The store's checksum of the whole differs from ``crc64nvme``.
        """
        ...

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Abort an unfinished upload and delete its parts; a missing one is not an error."""
        ...

    def pending_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        """Yield the unfinished uploads whose key begins with ``prefix``."""
        ...

    def list_parts(self, key: str, upload_id: str) -> Iterator[Part]:
        """Yield the stored parts of an unfinished upload, in order of number.

        Raises:
            NotFound: The upload was aborted or completed.
        """
        ...

    def read(
        self, key: str, *, offset: int = 0, length: int | None = None, etag: str | None = None
    ) -> AbstractContextManager[Readable]:
        """Open an object for reading from ``offset`` on; ``length`` in bytes, ``None``: to the end.

        Raises:
            NotFound: There is no such object.
            CorruptObject: The object does not have the given ``etag``, or it ends before ``offset + length``.
            StoreUnavailable: Also raised by ``readinto`` for a truncated answer, so that 0 always means EOF.
        """
        ...

    def reading(self, key: str, *, length: int) -> AbstractContextManager[Callable[[], Readable]]:
        """Request the first ``length`` bytes of an object; the function yielded waits for the answer, and acts as ``read``.

        Other objects can be requested meanwhile.
        """
        ...

    def hurry(self, hurried: bool) -> None:
        """Give up silent connections sooner after a termination notice; ``False``: the notice is withdrawn."""
        ...

    def close(self) -> None:
        """Close all connections. Calls in flight fail with ``StoreUnavailable``."""
        ...
