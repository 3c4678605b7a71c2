"""What every store does with an object that is sent in parts."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sidecar.core.format.checksum import checksum
from sidecar.errors import CorruptObject, NotFound
from sidecar.store.protocol import Capabilities, PendingUpload, Store, Verification
from tests.store.conftest import Backend, Source, read_all
from tests.store.test_conformance import content

MIB = 1 << 20
PART = 5 * MIB
KEY = "checkpoint-20/model.safetensors"


def test_parts_are_joined_in_order_of_number(store: Store, source: Source) -> None:
    first, second, tail = content(PART, seed=1), content(PART, seed=2), b"tail"
    upload_id = store.begin_upload(KEY)
    parts = [source.part(store, KEY, upload_id, number, part) for number, part in ((3, tail), (1, first), (2, second))]
    assert list(store.list_parts(KEY, upload_id)) == sorted(parts, key=lambda part: part.number)
    assert list(store.list("")) == []
    whole = first + second + tail
    stored = store.complete_upload(KEY, upload_id, parts, crc64nvme=checksum(whole))
    assert stored.size_bytes == len(whole)
    assert store.stat(KEY) == stored
    assert list(store.list("checkpoint-20/")) == [stored]
    assert read_all(store, KEY) == whole
    assert list(store.pending_uploads("")) == []


def test_an_empty_part_makes_an_empty_object(store: Store, source: Source) -> None:
    upload_id = store.begin_upload(KEY)
    part = source.part(store, KEY, upload_id, 1, b"")
    assert part.size_bytes == 0
    assert store.complete_upload(KEY, upload_id, [part], crc64nvme=0).size_bytes == 0
    assert store.get(KEY) == b""


def test_sending_a_part_again_replaces_it(store: Store, source: Source) -> None:
    upload_id = store.begin_upload(KEY)
    source.part(store, KEY, upload_id, 1, b"old")
    part = source.part(store, KEY, upload_id, 1, b"new and longer")
    assert list(store.list_parts(KEY, upload_id)) == [part]
    store.complete_upload(KEY, upload_id, [part], crc64nvme=checksum(b"new and longer"))
    assert store.get(KEY) == b"new and longer"


def test_parts_sent_at_the_same_time_all_arrive(store: Store, source: Source) -> None:
    pieces = [content(PART, seed=seed) for seed in range(4)]
    upload_id = store.begin_upload(KEY)
    with ThreadPoolExecutor(4) as senders:
        sent = [senders.submit(source.part, store, KEY, upload_id, n, piece) for n, piece in enumerate(pieces, 1)]
        parts = [part.result() for part in sent]
    store.complete_upload(KEY, upload_id, parts, crc64nvme=checksum(b"".join(pieces)))
    assert read_all(store, KEY) == b"".join(pieces)


def test_an_upload_continues_in_another_life(backend: Backend, store: Store, source: Source) -> None:
    upload_id = store.begin_upload(KEY)
    source.part(store, KEY, upload_id, 1, content(PART))
    later = store if backend.kind == "memory" else backend.open("run")
    later.probe()
    prefix = KEY if backend.kind == "minio" else "checkpoint-20/"  # MinIO lists a whole bucket, or one key
    assert list(later.pending_uploads(prefix)) == [PendingUpload(KEY, upload_id)]
    assert list(later.pending_uploads("checkpoint-21/")) == []
    if backend.kind != "memory":  # all times are the store's; moto's uploads were all begun in 2010
        [pending], [part] = later.pending_uploads(prefix), later.list_parts(KEY, upload_id)
        begun_at_s = time.time() if backend.kind in ("moto", "checking") else pending.begun_at_s
        assert abs(pending.listed_at_s - time.time()) < 60
        assert abs(begun_at_s - pending.listed_at_s) < 60
        assert abs(part.stored_at_s - pending.listed_at_s) < 60
    parts = [*later.list_parts(KEY, upload_id), source.part(later, KEY, upload_id, 2, b"rest")]
    later.complete_upload(KEY, upload_id, parts, crc64nvme=checksum(content(PART) + b"rest"))
    assert read_all(store, KEY) == content(PART) + b"rest"


def test_a_whole_of_another_checksum_is_corrupt(opened: tuple[Store, Capabilities], store: Store, source: Source) -> None:
    if opened[1].verification in (Verification.MD5, Verification.SIGNED_SHA256):
        pytest.skip("this store compares each part, not the whole")
    upload_id = store.begin_upload(KEY)
    part = source.part(store, KEY, upload_id, 1, b"weights")
    with pytest.raises(CorruptObject):
        store.complete_upload(KEY, upload_id, [part], crc64nvme=checksum(b"other"))
    with pytest.raises(NotFound):
        store.get(KEY)


def test_an_aborted_upload_leaves_nothing_and_can_be_aborted_again(backend: Backend, store: Store, source: Source) -> None:
    upload_id = store.begin_upload(KEY)
    part = source.part(store, KEY, upload_id, 1, b"part")
    store.abort_upload(KEY, upload_id)
    store.abort_upload(KEY, upload_id)
    assert list(store.pending_uploads("")) == []
    with pytest.raises(NotFound):
        list(store.list_parts(KEY, upload_id))
    if backend.kind not in ("moto", "checking"):  # moto answers 500
        with pytest.raises(NotFound):
            source.part(store, KEY, upload_id, 2, b"part")
    with pytest.raises(NotFound):
        store.complete_upload(KEY, upload_id, [part], crc64nvme=checksum(b"part"))


def test_a_part_that_is_not_there_cannot_be_joined(store: Store, source: Source) -> None:
    upload_id = store.begin_upload(KEY)
    part = source.part(store, KEY, upload_id, 1, b"part")
    other = type(part)(2, part.size_bytes, part.etag)
    with pytest.raises(NotFound):
        store.complete_upload(KEY, upload_id, [part, other], crc64nvme=checksum(b"partpart"))
