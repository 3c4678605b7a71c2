"""A large file on its way to the volume, and which of its ranges are there; it survives a crash."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from sidecar.core import checksum
from sidecar.core.manifest import FileEntry
from sidecar.core.parts import DEFAULT_PART_BYTES, part_ranges, range_bytes
from sidecar.store.slice import BLOCK_BYTES


@dataclass(slots=True)
class Partial:
    """A file on its way, and which of its ranges are there."""

    entry: FileEntry
    path: Path
    there: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Length and CRC64NVME by offset."""

    @staticmethod
    def prepare(folder: Path, entry: FileEntry) -> Partial:
        """Make room for a file, or find again what an earlier life has fetched of it.

        Raises:
            OSError: The volume is full: known before anything is fetched.
        """
        name = hashlib.blake2b(f"{entry.key}\0{entry.crc64nvme}\0{entry.size_bytes}".encode(), digest_size=12).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        partial = Partial(entry, folder / name)
        known = partial._recorded() if partial.path.exists() else {}
        if not known:
            partial._create()
        with partial.opened() as fd:
            # The record is believed only where the bytes say the same.
            partial.there = {offset: (n, crc) for offset, (n, crc) in known.items() if _crc_of(fd, offset, n) == crc}
        return partial

    @property
    def done_bytes(self) -> int:
        """How much is there."""
        return sum(length for length, _ in self.there.values())

    def missing(self) -> list[tuple[int, int]]:
        """Return the ranges that are not there."""
        size_bytes = self.entry.size_bytes
        ranges = part_ranges(size_bytes, part_bytes=range_bytes(size_bytes)) if size_bytes else []
        return [(offset, length) for offset, length in ranges if self.there.get(offset, (0, 0))[0] != length]

    def arrived(self, offset: int, length: int, crc: int) -> None:
        """A range is there."""
        self.there[offset] = length, crc
        if self.entry.size_bytes > DEFAULT_PART_BYTES:
            with suppress(OSError), self._record.open("ab") as record:  # a cache
                record.write(json.dumps([offset, length, crc]).encode() + b"\n")

    def crc(self) -> int:
        """Return the checksum of the whole."""
        return checksum.combined((self.there[offset][1], self.there[offset][0]) for offset in sorted(self.there))

    def move(self, target: Path) -> None:
        """Put the whole file where it belongs."""
        self.path.replace(target)
        self._record.unlink(missing_ok=True)

    def discard(self) -> None:
        """Forget everything."""
        self._record.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Open the file for reading and writing."""
        fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    @property
    def _record(self) -> Path:
        return self.path.with_suffix(".ranges")

    def _recorded(self) -> dict[int, tuple[int, int]]:
        found: dict[int, tuple[int, int]] = {}
        try:
            lines = self._record.read_bytes().splitlines()
        except OSError:
            return found
        for line in lines:
            try:
                offset, length, crc = json.loads(line)
                found[int(offset)] = int(length), int(crc)
            except (ValueError, TypeError):  # cut off by a crash
                continue
        return found

    def _create(self) -> None:
        self.discard()
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o664)
        try:
            _reserve(fd, self.entry.size_bytes)
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)


def holds(path: Path, entry: FileEntry) -> bool:
    """Whether a local file has an entry's size and checksum."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return os.fstat(fd).st_size == entry.size_bytes and _crc_of(fd, 0, entry.size_bytes) == entry.crc
    finally:
        os.close(fd)


def write_at(fd: int, block: memoryview, offset: int) -> None:
    """Write all of a block."""
    while block:
        count = os.pwrite(fd, block, offset)
        block, offset = block[count:], offset + count


def _reserve(fd: int, size_bytes: int) -> None:
    """Make sure that the volume has room for a new file.

    Disks only note it and write faster afterwards. Memory would be cleared page by page before anything is fetched, which
    takes as long as fetching: there it is enough to look.
    """
    if size_bytes and not _is_memory(fd):
        os.posix_fallocate(fd, 0, size_bytes)
        return
    space = os.fstatvfs(fd)
    if space.f_blocks and space.f_bavail * space.f_frsize < size_bytes:  # no blocks: a memory without a limit
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(fd, size_bytes)


def _is_memory(fd: int) -> bool:
    device = os.fstat(fd).st_dev
    with suppress(OSError), Path("/proc/self/mountinfo").open() as mounts:
        for fields in map(str.split, mounts):  # proc_pid_mountinfo(5): device is the third, the type follows the hyphen
            if fields[2] == f"{os.major(device)}:{os.minor(device)}":
                return fields[fields.index("-") + 1] == "tmpfs"
    return False


def _crc_of(fd: int, offset: int, length: int) -> int | None:
    crc, done, buffer = 0, 0, memoryview(bytearray(BLOCK_BYTES))
    while done < length:
        count = os.preadv(fd, [buffer[: min(BLOCK_BYTES, length - done)]], offset + done)
        if not count:
            return None
        crc = checksum.checksum(buffer[:count], crc)
        done += count
    return crc
