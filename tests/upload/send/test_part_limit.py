"""A file that grows beyond what its first part size allows becomes durable all the same, also after a restart."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sidecar.core.format.checksum import checksum, text_of
from sidecar.core.schedule.parts import LEAST_PARTS, largest_file_bytes, most_bytes, upload_ranges
from sidecar.daemon.settings import from_environment
from sidecar.errors import NotFound, PartRefused, StoreError
from sidecar.store.opening import open_from
from sidecar.store.protocol import Capabilities, Part, Store
from sidecar.store.slice import FileSlice
from sidecar.transfer.executor import StoreExecutor
from sidecar.upload.commit.overwrite_guard import OverwriteGuard
from sidecar.upload.schedule.dispatcher import Dispatcher
from sidecar.upload.send.file_transfer import FileTransfer
from sidecar.upload.send.journal import Journal
from sidecar.volume.opener import Folder
from sidecar.volume.unfinished import Unfinished
from tests import servers
from tests.store.memory import MemoryStore
from tests.upload.early.test_continued_upload import grown
from tests.upload.parts import PART_BYTES, executor, found, transfer, uploads

MAX_PARTS = 50
ROOM_BYTES = most_bytes(part_bytes=PART_BYTES, max_parts=MAX_PARTS)
MIB = 1 << 20


class FewParts(MemoryStore):
    """Takes few parts, and none with a higher number."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[tuple[str, int], int] = {}
        """Bytes by upload and number. On a busy machine a part may be hedged, which sends it again as the same one."""

    @property
    def sent_bytes(self) -> int:
        return sum(self._parts.values())

    def probe(self) -> Capabilities:
        return replace(super().probe(), max_parts=MAX_PARTS)

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> Part:
        if number > MAX_PARTS:
            raise StoreError(f"part {number}")
        self._parts[upload_id, number] = body.size_bytes
        return super().upload_part(key, upload_id, number, body)


def begun(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    path = folder / "model"
    path.write_bytes(content)
    return path


async def sent_early(
    path: Path, content: bytes, store: Store, running: StoreExecutor, *, part_bytes: int = PART_BYTES
) -> FileTransfer:
    """Send the beginning of a file that is small when it is seen first; go on in another life, when it has become large."""
    begun(path.parent, content[: 2 * part_bytes])
    await grown(path, store, running, parts=2)
    path.write_bytes(content)  # the same inode
    extents = upload_ranges(len(content), part_bytes=part_bytes, max_parts=store.probe().max_parts, whole_only=True)
    return await grown(path, store, running, parts=len(extents))


async def closed(path: Path, store: Store, running: StoreExecutor, early: FileTransfer) -> Journal:
    """Send a checkpoint that is finished, with what was sent of it early."""
    own, stream = transfer(path, store, running, journal=path.parent.with_suffix(".own")), Dispatcher(running)
    for stale in own.journal.take_over(early.journal, [found(path)]):
        store.abort_upload(stale.key, stale.upload_id)
    own.add([found(path)])
    stream.reorder([own])
    await own.finished()
    own.journal.close()
    return own.journal


@pytest.mark.parametrize("size_bytes", [MAX_PARTS * PART_BYTES + 1, 20 * MAX_PARTS * PART_BYTES, ROOM_BYTES])
async def test_a_file_that_grew_far_beyond_is_sent_once(size_bytes: int, tmp_path: Path) -> None:
    content, store = os.urandom(size_bytes), FewParts()
    path = tmp_path / "checkpoint-1/model"
    with executor(concurrency=4) as running:
        early = await sent_early(path, content, store, running)
        journal = await closed(path, store, running, early)
    assert store.get("checkpoint-1/model") == content
    assert store.sent_bytes == size_bytes
    entry = journal.entries["model"]
    assert (entry.part_bytes, entry.crc64nvme) == (PART_BYTES, text_of(content))
    assert journal.first_crcs["model"] == checksum(content[:PART_BYTES])
    assert not list(store.pending_uploads(""))


async def test_a_file_that_grew_beyond_all_its_parts_begins_anew_with_larger_ones(tmp_path: Path) -> None:
    content, store = os.urandom(ROOM_BYTES + 1), FewParts()
    path = tmp_path / "checkpoint-1/model"
    with executor(concurrency=4) as running:
        early = await sent_early(path, content[:-1], store, running)
        assert len(early.journal.uploads["model"].parts) == MAX_PARTS
        path.write_bytes(content)
        journal = await closed(path, store, running, early)
    assert store.get("checkpoint-1/model") == content
    assert journal.entries["model"].part_bytes > PART_BYTES


async def test_parts_that_are_not_where_their_numbers_belong_are_not_joined(tmp_path: Path) -> None:
    content, store = os.urandom(30 * PART_BYTES), FewParts()
    path = tmp_path / "checkpoint-1/model"
    with executor(concurrency=4) as running:
        early = await sent_early(path, content, store, running)
        for number in (26, 27):  # as if all parts had the size of the first
            early.journal.part("model", Part(number, PART_BYTES, "etag"), crc=1)
        early.journal.close()
        journal = await closed(path, store, running, early)
    assert store.get("checkpoint-1/model") == content
    assert journal.entries["model"].crc64nvme == text_of(content)


def test_nothing_is_sent_of_a_file_that_no_store_takes(tmp_path: Path) -> None:
    path = begun(tmp_path / "checkpoint-1", b"")
    with executor(concurrency=1) as running:
        one = transfer(path, FewParts(), running, journal=tmp_path / "journal")
        one.add([replace(found(path), size_bytes=largest_file_bytes(MAX_PARTS) + 1)])
        assert not one.has_more
        assert one.entries() is None


class Swift(MemoryStore):
    """Says what S3 says, and takes fewer parts."""

    def upload_part(self, key: str, upload_id: str, number: int, body: FileSlice) -> Part:
        if number > LEAST_PARTS:
            raise PartRefused(key, "InvalidArgument")
        return super().upload_part(key, upload_id, number, body)


async def test_a_store_that_takes_fewer_parts_gets_larger_ones(tmp_path: Path) -> None:
    content, store = os.urandom(2 * LEAST_PARTS * PART_BYTES), Swift()
    path = begun(tmp_path / "checkpoint-1", content)
    with executor(concurrency=4) as running:
        context = uploads(store, running)
        journal = Journal(Folder(tmp_path) / "checkpoint-1@1.jsonl")
        for most in (10_000, LEAST_PARTS):
            assert context.limits.known.max_parts >= most
            source = Unfinished(Folder(path.parent.parent) / path.parent.name)
            source.see(found(path))
            guard = OverwriteGuard(context.committer, "checkpoint-1", "")
            one = context.transfer("checkpoint-1", source, journal, guard=guard, on_wrong=lambda: None)
            stream = Dispatcher(running)
            one.add([found(path)])
            stream.reorder([one])
            if most > LEAST_PARTS:
                with pytest.raises((PartRefused, NotFound)):
                    await one.finished()
            else:
                await one.finished()
        journal.close()
    assert store.get("checkpoint-1/model") == content
    # A part that was on its way may begin another upload before it is refused, too: the commit aborts what the journal names.
    assert {pending.upload_id for pending in store.pending_uploads("")} <= {progress.upload_id for progress in journal.void}


@pytest.fixture(params=["moto", *servers.REAL_STORES])
def s3(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    endpoint = request.getfixturevalue(f"{request.param}_endpoint")
    servers.create_bucket(endpoint, "part-limit")
    settings = {
        "CKPT_STORE": f"s3://part-limit/{uuid.uuid4().hex}",
        "AWS_S3_ENDPOINT": endpoint,
        "AWS_DEFAULT_REGION": servers.REGION,
    }
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", servers.ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", servers.SECRET_KEY)
    store = open_from(from_environment(settings))
    can = replace(store.probe(), max_parts=4)
    monkeypatch.setattr(store, "probe", lambda: can)
    yield store
    store.close()


async def test_s3_joins_parts_that_become_larger(s3: Store, tmp_path: Path) -> None:
    content = os.urandom(31 * MIB)  # parts of 5, 5, 10 and 11 MiB
    path = tmp_path / "checkpoint-1/model"
    with executor(concurrency=2, part_bytes=5 * MIB) as running:
        early = await sent_early(path, content, s3, running, part_bytes=5 * MIB)
        journal = await closed(path, s3, running, early)
    assert s3.get("checkpoint-1/model") == content
    assert journal.entries["model"].crc64nvme == text_of(content)
