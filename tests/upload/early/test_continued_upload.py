"""What an earlier life sent of a file that is still being written is continued only if it is that file."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from sidecar.core.format.checksum import checksum
from sidecar.store.protocol import Capabilities, Store
from sidecar.transfer.executor import StoreExecutor
from sidecar.upload.schedule.dispatcher import Dispatcher
from sidecar.upload.send.file_transfer import FileTransfer
from tests.store.memory import MemoryStore
from tests.upload.parts import PART_BYTES, ended, executor, found, transfer, written

PARTS = 6


async def grown(path: Path, store: Store, running: StoreExecutor, *, parts: int) -> FileTransfer:
    """Send the first parts of a file, this many, and end."""
    one, stream = transfer(path, store, running, journal=path.parent.with_suffix(".jsonl"), growing=True), Dispatcher(running)
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
    with executor(concurrency=1) as running:
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


class LargeParts(MemoryStore):
    """Takes no smaller parts, as S3 does."""

    def probe(self) -> Capabilities:
        return replace(super().probe(), min_part_bytes=PART_BYTES)


async def test_parts_that_no_store_takes_are_not_continued(tmp_path: Path) -> None:
    path, store = written(tmp_path / "checkpoint-1", parts=20), LargeParts()
    with executor(concurrency=2) as running:
        forged = transfer(path, store, running, journal=tmp_path / "j.jsonl").journal
        forged.begun("model", found(path).stamp, upload_id="u", key="checkpoint-1/model", part_bytes=1)
        forged.close()
        one = transfer(path, store, running, journal=tmp_path / "j.jsonl")
        stream = Dispatcher(running)
        one.add([found(path)])
        stream.reorder([one])
        await ended(one)
    assert store.get("checkpoint-1/model") == path.read_bytes()
