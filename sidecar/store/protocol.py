"""What an object store must be able to do for us: one small protocol for S3, a folder and memory.

All calls block and are made from worker threads; any number of them may run at once. Keys are relative to the store's
root (``checkpoint-20/model.safetensors``). Whatever goes wrong arrives as a ``StoreError`` of ``sidecar.errors``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from sidecar.store.slice import FileSlice


class Verification(Enum):
    """How it is made sure that the store holds the bytes that were sent."""

    STORE_CRC = "store-crc"
    """The store compares our CRC64NVME of the whole object; the start-up probe saw it refuse a wrong one."""
    SIGNED_SHA256 = "signed-sha256"
    """The store compares the SHA-256 that each request signs; the start-up probe saw it refuse a wrong one."""
    MD5 = "md5"
    """The store answers each write with the MD5 of what it received, and we compare."""
    READ_BACK = "read-back"
    """Nothing can be had from the store: each object is read again and its CRC64NVME compared."""
    FSYNC = "fsync"
    """A file system: the kernel reported the bytes written and synced."""
    OFF = "off"
    """Asked for by ``CKPT_VERIFY=off``: nothing is verified when written, only when read."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the start-up probe found out about this store."""

    verification: Verification
    conditional_put: bool
    """``put(only_if_absent=True)`` is refused by the store itself when the object exists."""
    min_part_bytes: int
    max_parts: int
    round_trip_s: float | None = None
    """What a small request took, the slower of a read and a write; ``None``: it is no network that one waits for."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One object as the store lists it. ``etag`` is opaque and changes whenever the object is replaced."""

    key: str
    size_bytes: int
    etag: str


@dataclass(frozen=True, slots=True)
class Part:
    """One finished part of an unfinished upload. ``number`` counts from 1."""

    number: int
    size_bytes: int
    etag: str


@dataclass(frozen=True, slots=True)
class PendingUpload:
    """A multipart upload that was begun and neither completed nor aborted."""

    key: str
    upload_id: str
    begun_at_s: float = field(default=0.0, compare=False)
    """Epoch seconds, by the store's clock; 0 where it does not say."""


class Readable(Protocol):
    """An open object body."""

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill the beginning of ``buffer``; 0 at the end."""
        ...


class Store(Protocol):
    """See the module's docstring."""

    @property
    def url(self) -> str:
        """``s3://bucket/prefix``, ``file:///path`` or ``memory://name``, without credentials."""
        ...

    def probe(self) -> Capabilities:
        """Write, read, list and delete under ``.ckpt-probe/``, find out what the store can do, and remember it.

        Raises:
            AccessRefused: Names what was refused (bucket, credentials, permission, TLS, clock) and what to change.
            StoreUnavailable: The store did not answer.
        """
        ...

    def get(self, key: str) -> bytes:
        """Return a small object whole.

        Raises:
            NotFound: There is no such object.
        """
        ...

    def put(self, key: str, content: bytes, *, only_if_absent: bool = False) -> Stored:
        """Write a small object, atomically: it is never seen in part.

        Raises:
            AlreadyExists: ``only_if_absent`` and it exists; one that holds just this may pass for a write of ours whose answer
                was lost. Where ``conditional_put`` is false this is best effort.
        """
        ...

    def stat(self, key: str) -> Stored:
        """Return size and etag of an object.

        Raises:
            NotFound: There is no such object.
        """
        ...

    def list(self, prefix: str) -> Iterator[Stored]:
        """Every object whose key begins with ``prefix``, in order of key."""
        ...

    def list_folders(self) -> Iterator[str]:
        """The first parts of all keys that have more than one part: ``checkpoint-20``, ``final``."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that do not exist are no error. Order among them is not kept: call twice for order."""
        ...

    def put_file(self, key: str, body: FileSlice) -> Stored:
        """Write an object in one request from a file, verified as ``Capabilities.verification`` says.

        After it returns, ``body.crc64nvme`` is the checksum of what was sent.
        ``READ_BACK`` is the caller's part: it alone knows the whole object.

        Raises:
            CorruptObject: The store received something else; nothing is kept.
            Stopped: The body's gate was closed.
        """
        ...

    def putting_file(self, key: str, body: FileSlice) -> AbstractContextManager[Callable[[], Stored]]:
        """Send what ``put_file`` does; what this yields waits for the answer and returns or raises what that does.

        Others can be sent meanwhile. Whoever leaves the context without having asked does not know what became of it.
        """
        ...

    def copy(self, source: str, target: str, *, etag: str) -> Stored:
        """Make an object of the content of another, without moving the bytes through this machine.

        Raises:
            NotFound: There is no ``source``.
            CorruptObject: ``source`` was replaced: its etag is another.
        """
        ...

    def begin_upload(self, key: str) -> str:
        """Begin a multipart upload and return its id."""
        ...

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> Part:
        """Send one part. Sending the same number again replaces it. Raises as ``put_file``.

        Raises:
            NotFound: The upload was aborted or completed.
        """
        ...

    def complete_upload(self, key: str, upload_id: str, parts: Iterable[Part], *, crc64nvme: int) -> Stored:
        """Join the parts, in order of number, into the object.

        Raises:
            NotFound: The upload was aborted, or completed with other parts; a completion whose answer was lost may be repeated
                where the store's etags tell (S3 without KMS).
            CorruptObject: The store's checksum of the whole differs from ``crc64nvme``.
        """
        ...

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Drop an unfinished upload and its parts; one that does not exist is no error."""
        ...

    def pending_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        """Unfinished uploads whose key begins with ``prefix``."""
        ...

    def list_parts(self, key: str, upload_id: str) -> Iterator[Part]:
        """Finished parts of an unfinished upload, in order of number.

        Raises:
            NotFound: The upload was aborted or completed.
        """
        ...

    def read(
        self, key: str, *, offset: int = 0, length: int | None = None, etag: str | None = None
    ) -> AbstractContextManager[Readable]:
        """Open an object's bytes from ``offset`` on; ``length`` ``None`` means to the end.

        Raises:
            NotFound: There is no such object.
            CorruptObject: ``etag`` is given and the object was replaced since, or it ends before ``offset + length``.
            StoreUnavailable: Also from ``readinto``, when the answer breaks off: 0 always means the end.
        """
        ...

    def reading(self, key: str, *, length: int) -> AbstractContextManager[Callable[[], Readable]]:
        """Ask for the beginning of an object; what this yields waits for the answer and returns or raises what ``read`` does.

        Others can be asked for meanwhile.
        """
        ...

    def close(self) -> None:
        """Release connections. Calls in flight fail as ``StoreUnavailable``."""
        ...
