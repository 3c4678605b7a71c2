"""Multipart uploads of a folder store: each unfinished upload is a folder with one file per part."""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from sidecar.core.format import checksum
from sidecar.errors import NotFound
from sidecar.store.protocol import Part, PendingUpload

UPLOADS = ".ckpt-uploads"
"""Unfinished uploads and temporary files, below the store's root; never listed."""
KEY = "key"
"""File that names an upload's object."""
_CANNOT_COPY = frozenset(
    {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.EBADF, errno.EIO, errno.ETXTBSY}
)
"""``EIO``: SMB answers it. Where the disk fails, reading and writing fail, too."""


class Uploads:
    """``<id>/key`` names the object, ``<id>/part-<number>-<crc64nvme>`` are the parts. Raises ``OSError``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._files: dict[str, dict[int, str]] = {}
        """Name of each part's file by its number, by upload: a folder is listed once, not for each part."""

    def begin(self, key: str) -> str:
        """Return the id of a new upload."""
        upload_id = uuid.uuid4().hex
        folder = self.root / upload_id
        folder.mkdir(parents=True)
        try:
            (folder / KEY).write_text(json.dumps(key))
        except OSError:
            self.drop(upload_id)
            raise
        return upload_id

    def write_part(
        self, key: str, upload_id: str, number: int, fill: Callable[[int], None], crc64nvme: Callable[[], int]
    ) -> Part:
        """Write a part with ``fill``; ``crc64nvme`` is called afterwards."""
        folder = self._folder(key, upload_id)
        files = self._files.get(upload_id) or self._listed(folder)
        temporary = folder / f"tmp-{uuid.uuid4().hex}"
        try:
            with temporary.open("xb", buffering=0) as file:
                fill(file.fileno())
                os.fsync(file.fileno())
                size_bytes = os.fstat(file.fileno()).st_size
            part = Part(number, size_bytes, checksum.to_text(crc64nvme()))
            temporary.replace(folder / _name(part))
        finally:
            temporary.unlink(missing_ok=True)
        older, files[number] = files.get(number), _name(part)
        if older is not None and older != _name(part):
            (folder / older).unlink(missing_ok=True)
        return part

    def parts(self, key: str, upload_id: str) -> list[Part]:
        """Return the stored parts in order of number; of a part that was sent twice, the later one."""
        found = [(path, path.stat()) for path in self._folder(key, upload_id).glob("part-*")]
        newest: dict[int, Part] = {}
        for path, status in sorted(found, key=lambda entry: entry[1].st_mtime_ns):
            _, number, crc = path.name.split("-")
            newest[int(number)] = Part(int(number), status.st_size, crc, status.st_mtime)
        return [newest[number] for number in sorted(newest)]

    def checksum(self, key: str, upload_id: str, parts: Sequence[Part]) -> int:
        """Return the CRC64NVME of the object that the parts form.

        Raises:
            NotFound: A part is missing.
        """
        there = set(self.parts(key, upload_id))
        for part in parts:
            if part not in there:
                raise NotFound(f"{key} part {part.number}")
        return checksum.combined((checksum.from_text(part.etag), part.size_bytes) for part in parts)

    def join(self, upload_id: str, parts: Sequence[Part], target: int) -> None:
        """Append the parts to an open file, by sharing blocks where the file system can."""
        for part in parts:
            with (self.root / upload_id / _name(part)).open("rb", buffering=0) as file:
                append(target, file.fileno(), part.size_bytes)

    def drop(self, upload_id: str) -> None:
        """Delete an upload; a missing one is not an error.

        Its key goes last: what a killed process leaves, or a volume that fails, is still listed, and a later one drops it.
        """
        if _is_id(upload_id):
            folder = self.root / upload_id
            with suppress(OSError):
                for path in list(folder.iterdir()):
                    if path.name != KEY:
                        path.unlink(missing_ok=True)
                shutil.rmtree(folder)  # also a part that came meanwhile
        self._files.pop(upload_id, None)

    def without_key(self) -> Iterator[Path]:
        """Yield the folders of uploads that nobody can know: their creation was interrupted."""
        for folder in filter(lambda entry: _is_id(entry.name), self.root.iterdir()):
            try:
                (folder / KEY).lstat()
            except FileNotFoundError:
                yield folder
            except OSError:  # another user's
                continue

    def pending(self) -> Iterator[PendingUpload]:
        """Yield the uploads that were neither completed nor aborted."""
        if not self.root.is_dir() or not (folders := sorted(self.root.iterdir())):
            return
        listed_at_s = self._now_s()
        for folder in folders:
            with suppress(FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
                name = folder / KEY
                yield PendingUpload(str(json.loads(name.read_text())), folder.name, name.stat().st_mtime, listed_at_s)

    def _now_s(self) -> float:
        """Return the file system's time in epoch seconds: on a network file system, its server's clock."""
        temporary = self.root / f"tmp-{uuid.uuid4().hex}"
        try:
            temporary.touch(exist_ok=False)
            return temporary.stat().st_mtime
        finally:
            temporary.unlink(missing_ok=True)

    def _listed(self, folder: Path) -> dict[int, str]:
        names = {int(path.name.split("-")[1]): path.name for path in folder.glob("part-*")}
        return self._files.setdefault(folder.name, names)

    def _folder(self, key: str, upload_id: str) -> Path:
        folder = self.root / upload_id
        with suppress(FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
            if _is_id(upload_id) and json.loads((folder / KEY).read_text()) == key:
                return folder
        raise NotFound(f"{key} (upload {upload_id})")


def write_all(fd: int, content: bytes | memoryview) -> None:
    """Write all of ``content``; a single ``write`` may take less."""
    left = memoryview(content)
    while left:
        left = left[os.write(fd, left) :]


def _name(part: Part) -> str:
    return f"part-{part.number:05d}-{part.etag}"


def _is_id(upload_id: str) -> bool:
    return len(upload_id) == 32 and upload_id.isalnum()


def append(target: int, source: int, size_bytes: int) -> None:
    """Append the beginning of one file to another: by sharing blocks or inside the kernel, where the file system can."""
    left, is_shared = size_bytes, True
    while left:
        if is_shared:
            count = _share(source, target, left)
            is_shared = count > 0
        else:
            count = os.sendfile(target, source, None, left)
            if not count:
                raise NotFound(f"{left} bytes of a part")
        left -= count


def _share(source: int, target: int, size_bytes: int) -> int:
    """Return how many bytes the file system took at once; 0: it cannot, or says nothing, as some kernels do."""
    try:
        return os.copy_file_range(source, target, size_bytes)
    except OSError as error:
        if error.errno not in _CANNOT_COPY:
            raise
        return 0
