"""Room for what is fetched, on a disk and in memory."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from sidecar.core.format import checksum
from sidecar.core.format.manifest import FileEntry
from sidecar.core.schedule.parts import DEFAULT_PART_BYTES
from sidecar.download.partial_file import PartialFile, holds, write_at
from sidecar.volume.opener import Folder
from tests.mounts import mounted

MEMORY = Path("/dev/shm")
CONTENT = bytes(range(256)) * 10


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
        return
    if not MEMORY.is_dir():
        pytest.skip("no /dev/shm")
    with TemporaryDirectory(dir=MEMORY) as path:
        yield Path(path)


@pytest.fixture
def without_fallocate(tmp_path: Path) -> Iterator[Path]:
    """A file system that cannot allocate blocks in advance, as NFS before 4.2."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    if (program := shutil.which("mkfs.ext2", path=f"{os.environ['PATH']}:/sbin:/usr/sbin")) is None:
        pytest.skip("no mkfs.ext2")
    subprocess.run([program, "-q", image], check=True)
    with mounted(tmp_path / "ext2", "-o", "loop", str(image)) as folder:
        yield folder


def entry(size_bytes: int, crc: int = 0) -> FileEntry:
    return FileEntry(path="model", key="checkpoint-1/model", size_bytes=size_bytes, crc64nvme=checksum.to_text(crc))


def test_a_full_volume_is_known_before_anything_is_fetched(folder: Path) -> None:
    with pytest.raises(OSError, match=r"No space left|too large"):
        PartialFile.prepare(Folder(folder) / "", entry(1 << 50))
    assert list(folder.iterdir()) == []


def test_a_file_has_its_size_from_the_start_and_memory_is_not_cleared_first(folder: Path) -> None:
    partial = PartialFile.prepare(Folder(folder) / "", entry(3 * DEFAULT_PART_BYTES))
    status = partial.place.status()
    assert status.st_size == 3 * DEFAULT_PART_BYTES
    if MEMORY in folder.parents:
        assert status.st_blocks == 0


def test_no_byte_is_written_in_advance_where_blocks_cannot_be_allocated(without_fallocate: Path) -> None:
    partial = PartialFile.prepare(Folder(without_fallocate) / "", entry(3 * DEFAULT_PART_BYTES))
    assert partial.place.status().st_size == 3 * DEFAULT_PART_BYTES
    assert partial.place.status().st_blocks == 0


def test_ranges_that_are_there_are_found_again_and_believed_only_if_the_bytes_say_so(folder: Path) -> None:
    wanted = entry(3 * DEFAULT_PART_BYTES)
    partial = PartialFile.prepare(Folder(folder) / "", wanted)
    for offset in (0, DEFAULT_PART_BYTES):
        block = os.urandom(DEFAULT_PART_BYTES)
        with partial.opened() as fd:
            write_at(fd, memoryview(block), offset)
        partial.arrived(offset, len(block), checksum.checksum(block))
    with partial.opened() as fd:
        os.pwrite(fd, b"damaged", 100)
    again = PartialFile.prepare(Folder(folder) / "", wanted)
    assert again.missing() == [(0, DEFAULT_PART_BYTES), (2 * DEFAULT_PART_BYTES, DEFAULT_PART_BYTES)]


def test_only_the_recorded_content_counts_as_there(folder: Path) -> None:
    (folder / "model").write_bytes(CONTENT)
    assert holds(Folder(folder) / "model", entry(len(CONTENT), checksum.checksum(CONTENT)))
    assert not holds(Folder(folder) / "model", entry(len(CONTENT), checksum.checksum(CONTENT) ^ 1))
    assert not holds(Folder(folder) / "other", entry(len(CONTENT)))
