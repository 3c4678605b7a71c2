"""A store in memory: a deterministic substitute for S3 in tests and simulations."""

from __future__ import annotations

import hashlib
import io
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sidecar.core.format.checksum import checksum, to_text
from sidecar.core.format.key_limits import KeyLimits
from sidecar.core.format.manifest import MAX_DOCUMENT_BYTES
from sidecar.errors import AlreadyExists, CorruptObject, NotFound, OversizedDocument
from sidecar.store.protocol import Capabilities, Part, PendingUpload, Readable, Stored, Verification
from sidecar.store.slice import FileSlice


@dataclass(slots=True)
class _Object:
    content: bytes
    etag: str
    number: int = 0
    """Number of the write, counted over the whole store."""


@dataclass(slots=True)
class _Upload:
    key: str
    parts: dict[int, tuple[Part, bytes]] = field(default_factory=dict)


class MemoryStore:
    """All operations are atomic; verifies CRC64NVME as AWS S3 does."""

    def __init__(self, url: str = "memory://twin") -> None:
        self.url = url
        self.key_limits = KeyLimits()
        self._lock = threading.Lock()
        self._objects: dict[str, _Object] = {}
        self._uploads: dict[str, _Upload] = {}
        self._numbers = itertools.count(1)

    def probe(self) -> Capabilities:
        return Capabilities(
            Verification.STORE_CRC, conditional_put=True, min_part_bytes=1, max_parts=10_000, conditional_files=True
        )

    def get(self, key: str, *, most_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        with self._lock:
            content = self._object(key).content
        if len(content) > most_bytes:
            raise OversizedDocument(f"{self.url}/{key}", most_bytes=most_bytes, size_bytes=len(content))
        return content

    def put(self, key: str, content: bytes, *, only_if_absent: bool = False) -> Stored:
        with self._lock:
            if only_if_absent and key in self._objects:
                raise AlreadyExists(key)
            return self._write(key, content)

    def stat(self, key: str) -> Stored:
        with self._lock:
            return self._stored(key)

    def list(self, prefix: str) -> Iterator[Stored]:
        with self._lock:
            found = [self._stored(key) for key in sorted(self._objects) if key.startswith(prefix)]
        return iter(found)

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        with self._lock:
            inside = [key.removeprefix(prefix) for key in self._objects if key.startswith(prefix)]
            return iter(sorted({key.split("/", 1)[0] for key in inside if "/" in key}))

    def delete(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)

    def put_file(self, key: str, body: FileSlice, *, only_if_absent: bool = False) -> Stored:
        return self.put(key, _read_all(body), only_if_absent=only_if_absent)

    @contextmanager
    def putting_file(self, key: str, body: FileSlice, *, only_if_absent: bool = False) -> Iterator[Callable[[], Stored]]:
        yield lambda: self.put_file(key, body, only_if_absent=only_if_absent)

    def copy(self, source: str, target: str, *, etag: str) -> Stored:
        with self._lock:
            there = self._object(source)
            if there.etag != etag:
                raise CorruptObject(source, want=f"etag {etag}", got=f"etag {there.etag}")
            return self._write(target, there.content)

    def begin_upload(self, key: str) -> str:
        with self._lock:
            upload_id = f"upload-{next(self._numbers)}"
            self._uploads[upload_id] = _Upload(key)
            return upload_id

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> Part:
        content = _read_all(body)
        with self._lock:
            upload = self._upload(key, upload_id)
            part = Part(number, len(content), hashlib.blake2b(content, digest_size=8).hexdigest())
            upload.parts[number] = part, content
            return part

    def complete_upload(self, key: str, upload_id: str, parts: Iterable[Part], *, crc64nvme: int) -> Stored:
        with self._lock:
            upload = self._upload(key, upload_id)
            chosen = []
            for part in sorted(parts, key=lambda p: p.number):
                there = upload.parts.get(part.number)
                if there is None or there[0].etag != part.etag:
                    raise NotFound(f"{key} part {part.number}")
                chosen.append(there[1])
            content = b"".join(chosen)
            if (got := checksum(content)) != crc64nvme:
                raise CorruptObject(key, want=f"crc64nvme {to_text(crc64nvme)}", got=f"crc64nvme {to_text(got)}")
            del self._uploads[upload_id]
            return self._write(key, content)

    def abort_upload(self, key: str, upload_id: str) -> None:
        with self._lock:
            self._uploads.pop(upload_id, None)

    def pending_uploads(self, prefix: str) -> Iterator[PendingUpload]:
        with self._lock:
            found = [PendingUpload(u.key, i) for i, u in self._uploads.items() if u.key.startswith(prefix)]
        return iter(found)

    def list_parts(self, key: str, upload_id: str) -> Iterator[Part]:
        with self._lock:
            parts = self._upload(key, upload_id).parts
            return iter([parts[number][0] for number in sorted(parts)])

    @contextmanager
    def read(self, key: str, *, offset: int = 0, length: int | None = None, etag: str | None = None) -> Iterator[Readable]:
        with self._lock:
            there = self._object(key)
        if etag is not None and there.etag != etag:
            raise CorruptObject(key, want=f"etag {etag}", got=f"etag {there.etag}")
        end = max(offset, len(there.content)) if length is None else offset + length
        if end > len(there.content):
            raise CorruptObject(key, want=f"at least {end} bytes", got=f"{len(there.content)} bytes")
        yield io.BytesIO(there.content[offset:end])

    @contextmanager
    def reading(self, key: str, *, length: int) -> Iterator[Callable[[], Readable]]:
        with self.read(key, length=length) as body:
            yield lambda: body

    def hurry(self, hurried: bool) -> None:
        return

    def close(self) -> None:
        return

    def _object(self, key: str) -> _Object:
        if key not in self._objects:
            raise NotFound(key)
        return self._objects[key]

    def _stored(self, key: str) -> Stored:
        there = self._object(key)
        return Stored(key, len(there.content), there.etag, f"{there.number:020}")

    def _write(self, key: str, content: bytes) -> Stored:
        number = next(self._numbers)
        self._objects[key] = _Object(content, f"etag-{number}", number)
        return self._stored(key)

    def _upload(self, key: str, upload_id: str) -> _Upload:
        upload = self._uploads.get(upload_id)
        if upload is None or upload.key != key:
            raise NotFound(f"{key} (upload {upload_id})")
        return upload


def _read_all(body: FileSlice) -> bytes:
    blocks: list[bytes] = []
    body.each_block(lambda block: blocks.append(bytes(block)))
    return b"".join(blocks)
