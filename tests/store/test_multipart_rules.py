"""Multipart uploads that a client gets wrong, repeats, interleaves or stretches to the limits.

As S3 has it (user guide, "Multipart upload limits") and ceph/s3-tests checks it; where a server differs, it is named.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from sidecar.core.format.checksum import checksum
from sidecar.errors import NotFound, StoreError
from sidecar.store.protocol import Capabilities, Part, Store
from tests.store.conftest import ON_EACH_SERVER, Backend, Source, read_all
from tests.store.test_conformance import content
from tests.store.test_multipart import KEY, PART

MOST_PARTS = 10_000


def send(store: Store, source: Source, upload_id: str, pieces: dict[int, bytes]) -> list[Part]:
    with ThreadPoolExecutor(8) as senders:
        return list(senders.map(lambda piece: source.part(store, KEY, upload_id, *piece), pieces.items()))


def test_numbers_may_have_gaps_and_parts_may_be_named_in_any_order(store: Store, source: Source) -> None:
    pieces = {MOST_PARTS: b"last", 7: content(PART, seed=7), 2: content(PART, seed=2)}
    upload_id = store.begin_upload(KEY)
    parts = send(store, source, upload_id, pieces)
    assert [part.number for part in store.list_parts(KEY, upload_id)] == [2, 7, MOST_PARTS]
    whole = b"".join(pieces[number] for number in sorted(pieces))
    stored = store.complete_upload(KEY, upload_id, parts, crc64nvme=checksum(whole))
    assert stored == store.stat(KEY)
    for offset, length in (
        (0, len(whole)),
        (PART - 3, 6),
        (2 * PART - 1, 3),
        (PART, PART),
        (len(whole) - 4, 4),
        (2 * PART, None),
    ):
        end = None if length is None else offset + length
        assert read_all(store, KEY, offset=offset, length=length, etag=stored.etag) == whole[offset:end]


def test_a_number_beyond_the_limits_is_refused(
    backend: Backend, opened: tuple[Store, Capabilities], store: Store, source: Source
) -> None:
    if backend.kind in ("memory", "file"):
        pytest.skip("a limit of S3")
    assert opened[1].max_parts == MOST_PARTS, "no larger number is ever sent"
    upload_id = store.begin_upload(KEY)
    for number in (0, MOST_PARTS + 1):
        if backend.kind == "rgw":  # Ceph RGW 16 takes any number, and any number of parts
            assert source.part(store, KEY, upload_id, number, b"part").number == number
            continue
        with pytest.raises(StoreError):
            source.part(store, KEY, upload_id, number, b"part")
    assert backend.kind == "rgw" or list(store.list_parts(KEY, upload_id)) == []
    store.abort_upload(KEY, upload_id)


def test_a_part_that_is_too_small_spoils_the_whole_and_nothing_else(
    backend: Backend, opened: tuple[Store, Capabilities], store: Store, source: Source
) -> None:
    if opened[1].min_part_bytes <= 1:
        pytest.skip("this store takes parts of any size")
    store.put(KEY, b"before")
    upload_id = store.begin_upload(KEY)
    parts = send(store, source, upload_id, {1: b"small", 2: b"last"})
    with pytest.raises(StoreError):
        store.complete_upload(KEY, upload_id, parts, crc64nvme=checksum(b"smalllast"))
    assert store.get(KEY) == b"before"
    larger = source.part(store, KEY, upload_id, 1, content(PART))
    store.complete_upload(KEY, upload_id, [larger, parts[1]], crc64nvme=checksum(content(PART) + b"last"))
    assert read_all(store, KEY) == content(PART) + b"last"


def test_a_part_of_another_etag_is_not_joined(store: Store, source: Source) -> None:
    upload_id = store.begin_upload(KEY)
    old = source.part(store, KEY, upload_id, 1, b"old")
    source.part(store, KEY, upload_id, 1, b"new")
    with pytest.raises(StoreError):
        store.complete_upload(KEY, upload_id, [old], crc64nvme=checksum(b"old"))
    with pytest.raises(StoreError):
        store.complete_upload(KEY, upload_id, [replace(old, etag="0" * 32)], crc64nvme=checksum(b"new"))
    with pytest.raises(NotFound):
        store.stat(KEY)


def test_an_upload_of_no_parts_makes_no_object(store: Store) -> None:
    upload_id = store.begin_upload(KEY)
    with contextlib.suppress(StoreError):  # a folder joins nothing to nothing
        store.complete_upload(KEY, upload_id, [], crc64nvme=0)
    assert [found.size_bytes for found in store.list("")] in ([], [0])
    store.abort_upload(KEY, upload_id)


def test_what_is_completed_can_be_neither_aborted_nor_continued(backend: Backend, store: Store, source: Source) -> None:
    upload_id = store.begin_upload(KEY)
    part = source.part(store, KEY, upload_id, 1, b"weights")
    stored = store.complete_upload(KEY, upload_id, [part], crc64nvme=checksum(b"weights"))
    try:
        again = store.complete_upload(KEY, upload_id, [part], crc64nvme=checksum(b"weights"))
    except NotFound:
        assert backend.kind in ("memory", "file"), "S3's etags identify the object"
    else:
        assert again == stored
    store.abort_upload(KEY, upload_id)
    assert store.get(KEY) == b"weights"
    with pytest.raises(NotFound):
        list(store.list_parts(KEY, upload_id))
    if backend.kind not in ("moto", "checking"):  # moto answers 500
        with pytest.raises(NotFound):
            source.part(store, KEY, upload_id, 2, b"late")
    assert store.stat(KEY) == stored


def test_uploads_of_one_key_do_not_mix_and_the_one_completed_last_stays(store: Store, source: Source) -> None:
    store.put(KEY, b"before")
    first, second, third = (store.begin_upload(KEY) for _ in range(3))
    assert len({first, second, third}) == 3
    parts = {upload_id: source.part(store, KEY, upload_id, 1, upload_id.encode()) for upload_id in (first, second, third)}
    assert {pending.upload_id for pending in store.pending_uploads(KEY)} == {first, second, third}
    store.abort_upload(KEY, second)
    for upload_id in (third, first):
        assert list(store.list_parts(KEY, upload_id)) == [parts[upload_id]]
        store.complete_upload(KEY, upload_id, [parts[upload_id]], crc64nvme=checksum(upload_id.encode()))
        assert store.get(KEY) == upload_id.encode()
    assert list(store.pending_uploads(KEY)) == []


def test_writers_that_race_leave_one_whole_object(store: Store, source: Source) -> None:
    whole = content(PART) + b"tail"
    for _ in range(3):
        upload_id = store.begin_upload(KEY)
        parts = send(store, source, upload_id, {1: content(PART), 2: b"tail"})
        with ThreadPoolExecutor(2) as racers:
            put = racers.submit(store.put, KEY, b"document")
            with contextlib.suppress(StoreError):  # completed, and replaced before it was looked at
                racers.submit(store.complete_upload, KEY, upload_id, parts, crc64nvme=checksum(whole)).result()
            put.result()
        stored = store.stat(KEY)
        assert (stored.size_bytes, read_all(store, KEY, etag=stored.etag)) in ((len(whole), whole), (8, b"document"))


@pytest.mark.slow
def test_ten_thousand_parts_are_listed_and_joined(
    backend: Backend, opened: tuple[Store, Capabilities], store: Store, source: Source
) -> None:
    if opened[1].min_part_bytes > 1 or backend.is_shared_folder:
        pytest.skip("50 GB, of which the pages of a list are tested by themselves; CephFS takes minutes")
    upload_id = store.begin_upload(KEY)
    parts = send(store, source, upload_id, {number: b"%05d" % number for number in range(1, MOST_PARTS + 1)})
    assert list(store.list_parts(KEY, upload_id)) == parts
    whole = b"".join(b"%05d" % number for number in range(1, MOST_PARTS + 1))
    store.complete_upload(KEY, upload_id, parts, crc64nvme=checksum(whole))
    assert read_all(store, KEY) == whole


@ON_EACH_SERVER
@pytest.mark.slow
@pytest.mark.crowded
def test_more_pending_uploads_than_a_page_are_all_listed(backend: Backend, store: Store) -> None:
    if backend.kind in ("minio", "moto", "checking") or backend.is_shared_folder:
        pytest.skip("MinIO lists the uploads of one key alone, moto all in one page; no pages in a folder")
    keys = [f"checkpoint-{number % 3}/a b+{number:04}%" for number in range(1050)]
    with ThreadPoolExecutor(8) as writers:
        begun = set(zip(keys, writers.map(store.begin_upload, keys), strict=True))
    assert {(pending.key, pending.upload_id) for pending in store.pending_uploads("")} == begun
    of_one = {(key, upload_id) for key, upload_id in begun if key.startswith("checkpoint-1/")}
    assert {(pending.key, pending.upload_id) for pending in store.pending_uploads("checkpoint-1/")} == of_one
    with ThreadPoolExecutor(8) as writers:
        list(writers.map(lambda upload: store.abort_upload(*upload), begun))
    assert list(store.pending_uploads("")) == []
