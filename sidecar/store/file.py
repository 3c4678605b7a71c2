"""A folder as a store: a PVC or any mounted file system. Each write is a temp file, fsync, rename, fsync of the directory."""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sidecar.core import checksum
from sidecar.errors import AccessRefused, AlreadyExists, CorruptObject, NotFound, StoreError, StoreUnavailable
from sidecar.store.protocol import Capabilities, Part, PendingUpload, Readable, Stored, Verification
from sidecar.store.slice import BLOCK_BYTES, FileSlice

UPLOADS = ".ckpt-uploads"
"""Unfinished uploads, below the root; never listed."""
_TEMPORARY = ".ckpt-tmp-"
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_ADVICE = {
    errno.ENOSPC: "free space on the file system of CKPT_STORE or make it larger",
    errno.EDQUOT: "raise the quota of the file system of CKPT_STORE",
    errno.EACCES: "make the folder of CKPT_STORE writable for the sidecar's user or group",
    errno.EROFS: "mount the file system of CKPT_STORE writable",
    errno.ESTALE: "the file server restarted; it is tried again",
}


class FileStore:
    """Keys are paths below ``root``; they never leave it, also not through links."""

    def __init__(self, root: Path) -> None:
        self.url = f"file://{root}"
        self._root = root
        self._uploads = root / UPLOADS

    def probe(self) -> Capabilities:  # noqa: D102
        with _translated(self.url):
            self._root.mkdir(parents=True, exist_ok=True)
        key = f".ckpt-probe/{uuid.uuid4().hex}"
        self.put(key, b"probe")
        self.get(key)
        try:
            self.put(key, b"probe", only_if_absent=True)
            conditional = False
        except AlreadyExists:
            conditional = True
        self.delete([key])
        return Capabilities(Verification.FSYNC, conditional_put=conditional, min_part_bytes=1, max_parts=10_000)

    def get(self, key: str) -> bytes:  # noqa: D102
        with _translated(key):
            return self._path(key).read_bytes()

    def put(self, key: str, content: bytes, *, only_if_absent: bool = False) -> Stored:  # noqa: D102
        with _translated(key):
            path = self._place(key)
            temporary = _temporary(path)
            try:
                with temporary.open("xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                return self._publish(temporary, path, key, only_if_absent=only_if_absent)
            finally:
                temporary.unlink(missing_ok=True)

    def stat(self, key: str) -> Stored:  # noqa: D102
        with _translated(key):
            return _stored(key, self._path(key).lstat())

    def list(self, prefix: str) -> Iterator[Stored]:  # noqa: D102
        folder = prefix.rpartition("/")[0]
        with _translated(prefix or self.url):
            found = [s for s in self._walk(self._path(folder) if folder else self._root) if s.key.startswith(prefix)]
        return iter(sorted(found, key=lambda s: s.key))

    def list_folders(self) -> Iterator[str]:  # noqa: D102
        with _translated(self.url):
            try:
                with os.scandir(self._root) as entries:
                    names = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False) and e.name != UPLOADS)
            except FileNotFoundError:
                return iter(())
        return iter(names)

    def delete(self, keys: Iterable[str]) -> None:  # noqa: D102
        for key in keys:
            with _translated(key):
                path = self._path(key)
                path.unlink(missing_ok=True)
                self._prune(path.parent)

    def put_file(self, key: str, body: FileSlice) -> Stored:  # noqa: D102
        with _translated(key):
            path = self._place(key)
            temporary = _temporary(path)
            try:
                _write_slice(temporary, body)
                return self._publish(temporary, path, key, only_if_absent=False)
            finally:
                temporary.unlink(missing_ok=True)

    def begin_upload(self, key: str) -> str:  # noqa: D102
        upload_id = uuid.uuid4().hex
        with _translated(key):
            self._path(key)
            folder = self._uploads / upload_id
            folder.mkdir(parents=True)
            (folder / "key").write_text(json.dumps(key))
        return upload_id

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> Part:  # noqa: D102
        with _translated(key):
            folder = self._upload(key, upload_id)
            path = folder / f"part-{number:05d}"
            temporary = _temporary(path)
            try:
                _write_slice(temporary, body)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
            return _part(path)

    def complete_upload(self, key: str, upload_id: str, parts: Iterable[Part], *, crc64nvme: int) -> Stored:  # noqa: D102
        with _translated(key):
            folder = self._upload(key, upload_id)
            there = {part.number: part for part in self.list_parts(key, upload_id)}
            path = self._place(key)
            temporary = _temporary(path)
            try:
                crc = 0
                with temporary.open("xb", buffering=0) as whole:
                    for part in sorted(parts, key=lambda p: p.number):
                        if there.get(part.number) != part:
                            raise NotFound(f"{key} part {part.number}")
                        crc = _append(whole.fileno(), folder / f"part-{part.number:05d}", crc)
                    os.fsync(whole.fileno())
                if crc != crc64nvme:
                    want, got = checksum.to_text(crc64nvme), checksum.to_text(crc)
                    raise CorruptObject(key, want=f"crc64nvme {want}", got=f"crc64nvme {got}")
                stored = self._publish(temporary, path, key, only_if_absent=False)
            finally:
                temporary.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            return stored

    def abort_upload(self, key: str, upload_id: str) -> None:  # noqa: D102
        if "/" not in upload_id:
            shutil.rmtree(self._uploads / upload_id, ignore_errors=True)

    def pending_uploads(self, prefix: str) -> Iterator[PendingUpload]:  # noqa: D102
        if not self._uploads.is_dir():
            return
        for folder in sorted(self._uploads.iterdir()):
            with suppress(OSError, ValueError):
                key = json.loads((folder / "key").read_text())
                if isinstance(key, str) and key.startswith(prefix):
                    yield PendingUpload(key, folder.name)

    def list_parts(self, key: str, upload_id: str) -> Iterator[Part]:  # noqa: D102
        folder = self._upload(key, upload_id)
        return iter([_part(path) for path in sorted(folder.glob("part-*"))])

    @contextmanager
    def read(  # noqa: D102
        self, key: str, *, offset: int = 0, length: int | None = None, etag: str | None = None
    ) -> Iterator[Readable]:
        with _translated(key), self._path(key).open("rb", buffering=0) as file:
            there = _stored(key, os.fstat(file.fileno()))
            if etag is not None and there.etag != etag:
                raise CorruptObject(key, want=f"etag {etag}", got=f"etag {there.etag}")
            end = there.size_bytes if length is None else offset + length
            if end > there.size_bytes:
                raise CorruptObject(key, want=f"at least {end} bytes", got=f"{there.size_bytes} bytes")
            file.seek(offset)
            yield _Window(file.fileno(), end - offset)

    def close(self) -> None:  # noqa: D102
        return

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        if not key or any(part in ("", ".", "..") for part in parts) or parts[0] == UPLOADS or "\0" in key:
            raise StoreError(f"{key!r} is not a key of this store")
        path = self._root
        for part in parts[:-1]:
            path = path / part
            if path.is_symlink():
                raise AccessRefused(f"{path} is a symbolic link: the store follows none, replace it by a directory")
        return path / parts[-1]

    def _place(self, key: str) -> Path:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _publish(self, temporary: Path, path: Path, key: str, *, only_if_absent: bool) -> Stored:
        if only_if_absent:
            try:
                os.link(temporary, path)
            except FileExistsError:
                raise AlreadyExists(key) from None
        else:
            temporary.replace(path)
        _sync_directory(path.parent)
        return _stored(key, path.lstat())

    def _walk(self, folder: Path) -> Iterator[Stored]:
        for inside, folders, names in os.walk(folder):
            if Path(inside) == self._root and UPLOADS in folders:
                folders.remove(UPLOADS)
            for name in names:
                path = Path(inside, name)
                if not name.startswith(_TEMPORARY):
                    with suppress(FileNotFoundError):
                        yield _stored(path.relative_to(self._root).as_posix(), path.lstat())

    def _prune(self, folder: Path) -> None:
        while folder != self._root:
            try:
                folder.rmdir()
            except OSError:
                return
            folder = folder.parent

    def _upload(self, key: str, upload_id: str) -> Path:
        folder = self._uploads / upload_id
        with suppress(OSError, ValueError):
            if "/" not in upload_id and json.loads((folder / "key").read_text()) == key:
                return folder
        raise NotFound(f"{key} (upload {upload_id})")


class _Window:
    def __init__(self, fd: int, left: int) -> None:
        self._fd = fd
        self._left = left

    def readinto(self, buffer: memoryview, /) -> int:
        count = os.readv(self._fd, [buffer[: min(len(buffer), self._left)]]) if self._left else 0
        self._left -= count
        return count


@contextmanager
def _translated(name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise NotFound(name) from None
    except (NotADirectoryError, IsADirectoryError):
        raise NotFound(name) from None
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "it is tried again")
        text = f"{name}: {error.strerror} ({error.filename}): {advice}"
        raise (AccessRefused(text) if error.errno in _REFUSED else StoreUnavailable(text)) from error


def _temporary(path: Path) -> Path:
    return path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex[:12]}")


def _write_slice(path: Path, body: FileSlice) -> None:
    body.seek(0)
    with path.open("xb", buffering=0) as file:
        while block := body.read(BLOCK_BYTES):
            view = memoryview(block)
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def _append(target: int, source: Path, crc: int) -> int:
    with source.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            view = memoryview(block)
            while view:
                view = view[os.write(target, view) :]
            crc = checksum.checksum(block, crc)
    return crc


def _part(path: Path) -> Part:
    status = path.stat()
    return Part(int(path.name.removeprefix("part-")), status.st_size, _etag(status))


def _stored(key: str, status: os.stat_result) -> Stored:
    return Stored(key, status.st_size, _etag(status))


def _etag(status: os.stat_result) -> str:
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
