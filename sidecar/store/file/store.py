"""A folder as a store: a PVC or any mounted file system. Each write is a temporary file, fsync, rename, fsync of the folder."""

from __future__ import annotations

import os
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from sidecar.core.format import checksum, keys
from sidecar.core.format.key_limits import KeyLimits
from sidecar.core.format.manifest import MAX_DOCUMENT_BYTES
from sidecar.errors import AccessRefused, AlreadyExists, CorruptObject, NoFolder, NotFound, OversizedDocument, StoreError
from sidecar.store.file.errors import HAS_NO_LINKS, suppress_unsupported, translated, writing
from sidecar.store.file.uploads import UPLOADS, Uploads, append, write_all
from sidecar.store.protocol import Capabilities, Part, PendingUpload, Readable, Stored, Verification
from sidecar.store.slice import FileSlice

STALE_S = 86_400.0
"""Age in seconds from which a temporary file or an upload without a key is an orphan: no living process writes it."""
PLACE_TRIES = 10
"""Attempts to place an object: other processes remove empty folders, also the one that the object is about to enter."""
IN_A_POD = "KUBERNETES_SERVICE_HOST"
"""The kubelet sets it in each container, and deletes the container's own file system with it."""


class FileStore:
    """Keys are paths below ``root``; neither ``..`` nor symbolic links lead out of it."""

    def __init__(self, root: Path, *, verification: Verification = Verification.FSYNC) -> None:
        self.url = f"file://{root}"
        self.key_limits = KeyLimits(is_file_system=True)
        self._root = root
        self._verification = verification
        self._uploads = Uploads(root / UPLOADS)
        self._has_links = True
        self._device: int | None = None
        """File system of the root when the probe wrote there; ``None``: not probed."""

    def probe(self) -> Capabilities:  # noqa: D102
        with writing(self.url):
            try:
                self._root.mkdir(parents=True, exist_ok=True)
            except FileNotFoundError as error:
                raise NoFolder(f"{self.url}: the folder {error.filename} cannot be made: is its volume mounted?") from None
            self._uploads.root.mkdir(exist_ok=True)
            self._device = self._root.stat().st_dev
            self._remove_stale()
        key = f"{keys.PROBE}{uuid.uuid4().hex}"
        try:
            self.put(key, b"probe", only_if_absent=True)
            self.get(key)
            next(self.list(keys.PROBE))
        finally:
            self.delete([key])
        return Capabilities(
            self._verification,
            conditional_put=self._has_links,
            min_part_bytes=1,
            max_parts=10_000,
            ends_with_container=ends_with_container(self._root, environ=os.environ),
        )

    def get(self, key: str, *, most_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:  # noqa: D102
        with translated(key), self._opened(key) as (fd, there), os.fdopen(fd, "rb", closefd=False) as file:
            if there.size_bytes > most_bytes:
                raise OversizedDocument(f"{self.url}/{key}", most_bytes=most_bytes, size_bytes=there.size_bytes)
            return file.read(there.size_bytes)

    def put(self, key: str, content: bytes, *, only_if_absent: bool = False) -> Stored:  # noqa: D102
        return self._write(key, lambda fd: write_all(fd, content), only_if_absent=only_if_absent)

    def stat(self, key: str) -> Stored:  # noqa: D102
        with self._found(key):
            status = self._path(key).lstat()
        if not stat.S_ISREG(status.st_mode):
            raise NotFound(key)
        return _stored(key, status)

    def list(self, prefix: str) -> Iterator[Stored]:  # noqa: D102
        self._require_root()
        folder = prefix.rpartition("/")[0]
        with translated(prefix or self.url):
            found = [s for s in self._walk(self._path(folder) if folder else self._root) if s.key.startswith(prefix)]
        return iter(sorted(found, key=lambda s: s.key))

    def list_folders(self, prefix: str = "") -> Iterator[str]:  # noqa: D102
        self._require_root()
        folder = self._path(prefix.rstrip("/")) if prefix else self._root
        with translated(prefix or self.url), os.scandir(folder) as entries:
            return iter(sorted(e.name for e in entries if e.is_dir(follow_symlinks=False) and e.name != UPLOADS))

    def delete(self, keys: Iterable[str]) -> None:  # noqa: D102
        folders = set()
        for key in keys:
            with writing(key), suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                path = self._path(key)
                path.unlink()
                folders.add(path.parent)
        for folder in sorted(folders):
            with writing(str(folder)), suppress(FileNotFoundError):
                sync_directory(folder)
                self._prune(folder)

    def put_file(self, key: str, body: FileSlice, *, only_if_absent: bool = False) -> Stored:  # noqa: D102
        return self._write(key, lambda fd: _write_slice(fd, body), only_if_absent=False)

    @contextmanager
    def putting_file(  # noqa: D102
        self, key: str, body: FileSlice, *, only_if_absent: bool = False
    ) -> Iterator[Callable[[], Stored]]:
        yield lambda: self.put_file(key, body)

    def copy(self, source: str, target: str, *, etag: str) -> Stored:  # noqa: D102
        with self._opened(source) as (fd, there):
            if there.etag != etag:
                raise CorruptObject(source, want=f"etag {etag}", got=f"etag {there.etag}")
            return self._write(target, lambda to: append(to, fd, there.size_bytes), only_if_absent=False)

    def begin_upload(self, key: str) -> str:  # noqa: D102
        self._path(key)
        with writing(key):
            self._require_root_for_write()
            return self._uploads.begin(key)

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> Part:  # noqa: D102
        with translated(f"{key} part {number}"):
            return self._uploads.write_part(key, upload_id, number, lambda fd: _write_slice(fd, body), lambda: body.crc64nvme)

    def complete_upload(self, key: str, upload_id: str, parts: Iterable[Part], *, crc64nvme: int) -> Stored:  # noqa: D102
        ordered = sorted(parts, key=lambda part: part.number)
        with translated(key):
            crc = self._uploads.checksum(key, upload_id, ordered)
        if crc != crc64nvme:
            want, got = checksum.to_text(crc64nvme), checksum.to_text(crc)
            raise CorruptObject(key, want=f"crc64nvme {want}", got=f"crc64nvme {got}")
        stored = self._write(key, lambda fd: self._uploads.join(upload_id, ordered, fd), only_if_absent=False)
        self._uploads.drop(upload_id)
        return stored

    def abort_upload(self, key: str, upload_id: str) -> None:  # noqa: D102
        self._uploads.drop(upload_id)

    def pending_uploads(self, prefix: str) -> Iterator[PendingUpload]:  # noqa: D102
        with translated(self.url):
            return iter([upload for upload in self._uploads.pending() if upload.key.startswith(prefix)])

    def list_parts(self, key: str, upload_id: str) -> Iterator[Part]:  # noqa: D102
        with translated(key):
            return iter(self._uploads.parts(key, upload_id))

    @contextmanager
    def read(  # noqa: D102
        self, key: str, *, offset: int = 0, length: int | None = None, etag: str | None = None
    ) -> Iterator[Readable]:
        with self._opened(key) as (fd, there):
            if etag is not None and there.etag != etag:
                raise CorruptObject(key, want=f"etag {etag}", got=f"etag {there.etag}")
            end = max(offset, there.size_bytes) if length is None else offset + length
            if end > there.size_bytes:
                raise CorruptObject(key, want=f"at least {end} bytes", got=f"{there.size_bytes} bytes")
            yield _Window(fd, key, offset, end)

    @contextmanager
    def reading(self, key: str, *, length: int) -> Iterator[Callable[[], Readable]]:  # noqa: D102
        with self.read(key, length=length) as body:
            yield lambda: body

    def hurry(self, hurried: bool) -> None:  # noqa: D102
        return

    def close(self) -> None:  # noqa: D102
        return

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        if any(part in ("", ".", "..") for part in parts) or parts[0] == UPLOADS or "\0" in key:
            raise StoreError(f"{key!r} is not a key of this store")
        path = self._root
        for part in parts[:-1]:
            path = path / part
            with writing(key):
                is_link = path.is_symlink()
            if is_link:
                raise AccessRefused(f"{path} is a symbolic link: the store follows none, replace it by a directory")
        return path / parts[-1]

    @contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, Stored]]:
        with self._found(key):
            fd = os.open(self._path(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            with translated(key):
                status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise NotFound(key)
            yield fd, _stored(key, status)
        finally:
            os.close(fd)

    def _write(self, key: str, fill: Callable[[int], None], *, only_if_absent: bool) -> Stored:
        path = self._path(key)
        with writing(key):
            self._require_root_for_write()
            temporary = self._uploads.root / f"tmp-{uuid.uuid4().hex}"
            try:
                with temporary.open("xb", buffering=0) as file:
                    fill(file.fileno())
                    os.fsync(file.fileno())
                    stored = _stored(key, os.fstat(file.fileno()))
                self._publish(temporary, path, key, only_if_absent=only_if_absent)
            finally:
                temporary.unlink(missing_ok=True)
        return stored

    def _publish(self, temporary: Path, path: Path, key: str, *, only_if_absent: bool) -> None:
        for attempt in range(PLACE_TRIES):
            try:
                _make_folder(path.parent)
                if only_if_absent:
                    self._link(temporary, path, key)
                else:
                    temporary.replace(path)
                break
            except FileNotFoundError:
                if attempt == PLACE_TRIES - 1:
                    raise
        with suppress(FileNotFoundError):  # deleted meanwhile, with its folder
            sync_directory(path.parent)

    def _link(self, temporary: Path, path: Path, key: str) -> None:
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise AlreadyExists(key) from None
        except OSError as error:
            if error.errno not in HAS_NO_LINKS:
                raise
            self._has_links = False  # two concurrent writers may both succeed: the probe reports no conditional put
            if path.exists():
                raise AlreadyExists(key) from None
            temporary.replace(path)

    def _walk(self, folder: Path) -> Iterator[Stored]:
        for inside, folders, names in os.walk(folder, onerror=_unless_gone):
            if Path(inside) == self._root and UPLOADS in folders:
                folders.remove(UPLOADS)
            for name in names:
                path = Path(inside, name)
                with suppress(FileNotFoundError):
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode):
                        yield _stored(path.relative_to(self._root).as_posix(), status)

    def _prune(self, folder: Path) -> None:
        while folder != self._root:
            try:
                folder.rmdir()
            except OSError:
                return
            folder = folder.parent

    @contextmanager
    def _found(self, key: str) -> Iterator[None]:
        """Raise ``NotFound`` only where the store itself is there."""
        try:
            with translated(key):
                yield
        except NotFound:
            if self._device is not None:
                self._require_root()
            raise

    def _require_root(self) -> None:
        """Raise ``NoFolder`` if the root is missing, or if another file system without what the probe made is in its place."""
        with writing(self.url):
            if not self._root.is_dir():
                raise NoFolder(f"{self.url}: no such folder: is its volume mounted?")
            if self._device not in (None, self._root.stat().st_dev) and not self._uploads.root.is_dir():
                raise NoFolder(f"{self.url}: another file system is in the place of the store's: is its volume mounted?")

    def _require_root_for_write(self) -> None:
        """The probe alone makes the root: made again below an empty mount point, it would be on the wrong disk."""
        if self._device is not None:
            self._require_root()
        self._uploads.root.mkdir(parents=self._device is None, exist_ok=True)

    def _remove_stale(self) -> None:
        for temporary in self._uploads.root.glob("tmp-*"):
            with suppress(FileNotFoundError):
                if _is_stale(temporary):
                    temporary.unlink()
        for folder in self._uploads.without_key():
            with suppress(FileNotFoundError):
                if _is_stale(folder):
                    self._uploads.drop(folder.name)


class _Window:
    def __init__(self, fd: int, key: str, position: int, end: int) -> None:
        self._fd = fd
        self._key = key
        self._position = position
        self._end = end

    def readinto(self, buffer: memoryview, /) -> int:
        wanted = min(len(buffer), self._end - self._position)
        if not wanted:
            return 0
        with translated(self._key):
            count = os.preadv(self._fd, [buffer[:wanted]], self._position)
        if not count:
            raise CorruptObject(self._key, want=f"at least {self._end} bytes", got=f"{self._position} bytes")
        self._position += count
        return count


def _is_stale(path: Path) -> bool:
    return time.time() - path.lstat().st_mtime > STALE_S


def _write_slice(fd: int, body: FileSlice) -> None:
    body.each_block(lambda block: write_all(fd, block))


def _stored(key: str, status: os.stat_result) -> Stored:
    etag = f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"
    return Stored(key, status.st_size, etag, f"{status.st_mtime_ns:020}")


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent)
        try:
            folder.mkdir()
        except FileExistsError:  # made by another process, and perhaps removed again: the next attempt tells
            with suppress(FileNotFoundError):
                if not stat.S_ISDIR(folder.lstat().st_mode):
                    raise
        sync_directory(folder.parent)


def _unless_gone(error: OSError) -> None:
    # An unreadable folder must not look empty: objects missing from a listing count as deleted.
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def ends_with_container(folder: Path, *, environ: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Whether a folder lies on the container's own file system, not on a volume that is mounted there. Outside pods: false."""
    return bool(environ.get(IN_A_POD)) and folder.stat().st_dev == root.stat().st_dev


def sync_directory(path: Path) -> None:
    """Fsync a directory, so that renames into it and removals from it survive a power failure."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress_unsupported():
            os.fsync(fd)
    finally:
        os.close(fd)
