"""What an earlier life sent of a file that is still being written is continued only if it is that file."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sidecar.core.checksum import checksum
from sidecar.store.memory import MemoryStore
from sidecar.transfer import Transfers
from sidecar.upload.sending import Sending
from sidecar.upload.stream import Stream
from tests.upload.parts import PART_BYTES, found, sending, transfers, written

PARTS = 6


async def grown(path: Path, store: MemoryStore, running: Transfers, *, parts: int) -> Sending:
    """Send so many parts in the beginning of a file, and end."""
    one, stream = sending(path, store, running, journal=path.parent.with_suffix(".jsonl"), growing=True), Stream(running)
    one.add_growing(found(path))
    stream.reorder([one])
    while "model" not in one.journal.uploads or len(one.journal.uploads["model"].parts) < parts:
        await asyncio.sleep(0.01)
    one.close()
    await one.finished()
    one.journal.close()
    return one


@pytest.mark.parametrize("is_the_same", [True, False])
async def test_parts_are_kept_if_the_first_of_them_is_what_the_file_begins_with(tmp_path: Path, is_the_same: bool) -> None:
    path, store = written(tmp_path / "checkpoint-1", parts=PARTS // 2), MemoryStore()
    with transfers(concurrency=1) as running:
        before = (await grown(path, store, running, parts=PARTS // 2)).journal
        with path.open("r+b") as file:  # the same inode
            content = file.read() + b"m" * (PARTS // 2 * PART_BYTES) if is_the_same else b"n" * (PARTS * PART_BYTES)
            file.seek(0)
            file.write(content)
        after = (await grown(path, store, running, parts=PARTS)).journal
    ids = before.uploads["model"].upload_id, after.uploads["model"].upload_id
    assert (ids[0] == ids[1]) is is_the_same
    assert [upload.upload_id for upload in after.void] == ([] if is_the_same else [ids[0]])
    wanted = [checksum(content[begin : begin + PART_BYTES]) for begin in range(0, len(content), PART_BYTES)]
    assert [crc for _, crc in sorted(after.uploads["model"].checksums.items())] == wanted
