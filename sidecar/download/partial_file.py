"""Partial download of a large file, with a record of the stored ranges; it survives a crash."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import stat
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from sidecar.core.format import checksum
from sidecar.core.format.manifest import FileEntry
from sidecar.core.schedule.parts import DEFAULT_PART_BYTES, part_ranges, range_bytes
from sidecar.store.slice import BLOCK_BYTES
from sidecar.volume.descriptors import opened, write_all
from sidecar.volume.opener import Place

_libc = ctypes.CDLL(None, use_errno=True)
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT
_MAX_RECORD_BYTES = 4 << 20
"""Maximum size of a record; the ranges of the largest file take less."""


@dataclass(slots=True)
class PartialFile:
    """A partially downloaded file and its stored ranges."""

    entry: FileEntry
    place: Place
    there: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Length and CRC64NVME of the stored ranges, by offset."""

    @staticmethod
    def prepare(folder: Place, entry: FileEntry) -> PartialFile:
        """Reserve space for a file, or continue the partial download of an earlier process.

        Raises:
            OSError: The volume is full, known before anything is fetched.
        """
        folder.make_folder()
        partial = PartialFile(entry, folder / names_of(entry)[0])
        known = partial._recorded() if partial._is_there() else {}
        if not known:
            partial._create()
        with partial.opened() as fd:
            # A recorded range counts only if its bytes have the recorded checksum.
            partial.there = {offset: (n, crc) for offset, (n, crc) in known.items() if crc_of(fd, offset, n) == crc}
        return partial

    @property
    def done_bytes(self) -> int:
        """Bytes stored."""
        return sum(length for length, _ in self.there.values())

    def missing(self) -> list[tuple[int, int]]:
        """Return the missing ranges, as ``(offset, length)``."""
        size_bytes = self.entry.size_bytes
        ranges = part_ranges(size_bytes, part_bytes=range_bytes(size_bytes)) if size_bytes else []
        return [(offset, length) for offset, length in ranges if self.there.get(offset, (0, 0))[0] != length]

    def arrived(self, offset: int, length: int, crc: int) -> None:
        """Record a stored range."""
        self.there[offset] = length, crc
        if self.entry.size_bytes > DEFAULT_PART_BYTES:
            with suppress(OSError), opened(self._record.open_file(_APPEND, 0o664)) as record:  # the record is a cache
                write_all(record, json.dumps([offset, length, crc]).encode() + b"\n")

    def crc(self) -> int:
        """Return the checksum of the whole file, from those of its ranges."""
        return checksum.combined((self.there[offset][1], self.there[offset][0]) for offset in sorted(self.there))

    def move(self, target: Place) -> None:
        """Move the complete file to its place."""
        self.place.rename(target)
        self._record.discard()

    def discard(self) -> None:
        """Delete the partial file and its record."""
        self._record.discard()
        self.place.discard()

    def opened(self) -> AbstractContextManager[int]:
        """Open the file for reading and writing."""
        return opened(self.place.open_file(os.O_RDWR))

    @property
    def _record(self) -> Place:
        return self.place.with_name(names_of(self.entry)[1])

    def _is_there(self) -> bool:
        """Whether it is a regular file of the right size, without other hard links."""
        try:
            status = self.place.status()
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == self.entry.size_bytes and status.st_nlink == 1

    def _recorded(self) -> dict[int, tuple[int, int]]:
        found: dict[int, tuple[int, int]] = {}
        try:
            lines = self._record.read(max_bytes=_MAX_RECORD_BYTES)[0].splitlines()
        except OSError:
            return found
        wanted = dict(self.missing())
        for line in lines:
            try:
                offset, length, crc = map(int, json.loads(line))
            except (ValueError, TypeError, OverflowError, RecursionError):  # truncated by a crash
                continue
            if wanted.get(offset) == length:
                found[offset] = length, crc
        return found

    def _create(self) -> None:
        self.discard()
        with opened(self.place.create(0o664, access=os.O_RDWR)) as fd:
            try:
                _reserve(fd, self.entry.size_bytes)
            except OSError:
                self.place.discard()
                raise


def names_of(entry: FileEntry) -> tuple[str, str]:
    """Return the names of an entry's partial file and of the record of its ranges, which its expected content decides."""
    content = f"{entry.key}\0{entry.crc64nvme}\0{entry.size_bytes}"
    name = hashlib.blake2b(content.encode(), digest_size=12).hexdigest()
    return name, f"{name}.ranges"


def holds(place: Place, entry: FileEntry) -> bool:
    """Whether a local file has an entry's size and checksum."""
    try:
        fd = place.open_file()
    except OSError:
        return False
    with opened(fd):
        return os.fstat(fd).st_size == entry.size_bytes and crc_of(fd, 0, entry.size_bytes) == entry.crc


def write_at(fd: int, block: memoryview, offset: int) -> None:
    """Write the whole block at ``offset``."""
    while block:
        count = os.pwrite(fd, block, offset)
        block, offset = block[count:], offset + count


def _reserve(fd: int, size_bytes: int) -> None:
    """Reserve space for a new file, where the file system can.

    On disks, allocation is cheap and makes writes faster. On tmpfs it would clear every page first, which takes as long as the
    download. Network file systems say yes without a reservation, or cannot: there only the free space is checked.

    Raises:
        OSError: There is not enough space.
    """
    space = os.fstatvfs(fd)
    if space.f_blocks and space.f_bavail * space.f_frsize < size_bytes:  # no blocks: tmpfs without a limit
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if not size_bytes or _is_memory(fd) or not _allocated(fd, size_bytes):
        os.ftruncate(fd, size_bytes)


def _allocated(fd: int, size_bytes: int) -> bool:
    """Allocate a file's blocks; ``False``: its file system cannot (NFS before 4.2, many of FUSE).

    Not ``os.posix_fallocate``: there the C library writes a byte into every 4 KiB instead, and NFS sends them all.
    """
    if not _libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size_bytes)):
        return True
    number = ctypes.get_errno()
    if number in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR):
        return False
    raise OSError(number, os.strerror(number))


def _is_memory(fd: int) -> bool:
    device = os.fstat(fd).st_dev
    with suppress(OSError), Path("/proc/self/mountinfo").open() as mounts:
        for fields in map(str.split, mounts):  # proc_pid_mountinfo(5): device is the third, the type follows the hyphen
            if fields[2] == f"{os.major(device)}:{os.minor(device)}":
                return fields[fields.index("-") + 1] == "tmpfs"
    return False


def crc_of(fd: int, offset: int, length: int) -> int | None:
    """Return the CRC64NVME of a range of a file; ``None``: the file ends before it."""
    crc, done, buffer = 0, 0, memoryview(bytearray(BLOCK_BYTES))
    while done < length:
        count = os.preadv(fd, [buffer[: min(BLOCK_BYTES, length - done)]], offset + done)
        if not count:
            return None
        crc = checksum.checksum(buffer[:count], crc)
        done += count
    return crc
