"""What every store does, whatever it is made of."""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress

import pytest

from sidecar.core.format.checksum import checksum
from sidecar.errors import (
    AlreadyExists,
    CheckpointChanged,
    CorruptObject,
    NotFound,
    OversizedDocument,
    Stopped,
    StoreError,
    StoreUnavailable,
)
from sidecar.store.protocol import Capabilities, Readable, Store, Verification
from sidecar.store.slice import OpenGate
from tests.store.conftest import ON_EACH_LISTING, Backend, Source, read_all

MIB = 1 << 20
PART = 5 * MIB
KEY = "checkpoint-20/model.safetensors"
SOON_S = 3.0
"""What takes longer was not stopped at the next block."""


def content(size_bytes: int, *, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def test_the_probe_leaves_nothing_behind(store: Store) -> None:
    assert list(store.list("")) == []
    assert list(store.list_folders()) == []
    assert list(store.pending_uploads("")) == []


def test_the_probe_finds_the_strongest_verification_that_the_store_has(
    backend: Backend, opened: tuple[Store, Capabilities]
) -> None:
    expected = {
        "memory": Verification.STORE_CRC,
        "file": Verification.FSYNC,
        "moto": Verification.MD5,
        "checking": Verification.STORE_CRC,
        "rgw": Verification.SIGNED_SHA256 if backend.sends_bodies_by == "wire" else Verification.MD5,
        "minio": Verification.STORE_CRC,
    }
    assert opened[1].verification is expected[backend.kind]
    assert opened[1].conditional_put
    assert opened[1].conditional_files is (backend.kind != "file")


def test_what_was_put_is_got(store: Store) -> None:
    stored = store.put("run.json", b"{}")
    assert store.get("run.json") == b"{}"
    assert store.stat("run.json") == stored
    assert list(store.list("")) == [stored]


def test_a_missing_object_is_not_found(store: Store) -> None:
    for call in (store.get, store.stat, lambda key: read_all(store, key)):
        with pytest.raises(NotFound):
            call("checkpoint-1/.complete")


def test_an_object_larger_than_a_document_is_not_read(store: Store) -> None:
    store.put("k", b"x" * 5000)
    assert store.get("k", most_bytes=5000) == b"x" * 5000
    with pytest.raises(OversizedDocument, match=r"k: 5000 bytes.*4999 at most"):
        store.get("k", most_bytes=4999)


def test_the_etag_changes_with_every_replacement(store: Store) -> None:
    etags = [store.put("k", text).etag for text in (b"one", b"two", b"three")]
    assert len(set(etags)) == 3
    assert store.stat("k").etag == etags[-1]


def test_a_listing_says_in_which_order_objects_were_written(store: Store) -> None:
    for key, content in (("b", b"1"), ("a", b"2"), ("c", b"3")):
        store.put(f"checkpoint-1/{key}", content)
    times = {stored.key[-1]: stored.modified for stored in store.list("checkpoint-1/")}
    assert "" < times["b"] <= times["a"] <= times["c"]


def test_a_conditional_put_refuses_to_replace(store: Store) -> None:
    store.put("k", b"first", only_if_absent=True)
    with pytest.raises(AlreadyExists):
        store.put("k", b"second", only_if_absent=True)
    assert store.get("k") == b"first"


def test_of_eight_racing_conditional_puts_exactly_one_wins(store: Store) -> None:
    for turn in range(5):
        start = threading.Barrier(8)

        def put(writer: int, key: str = f"race-{turn}", start: threading.Barrier = start) -> bool:
            start.wait()
            try:
                store.put(key, b"%d" % writer, only_if_absent=True)
            except AlreadyExists:
                return False
            return True

        with ThreadPoolExecutor(8) as writers:
            won = list(writers.map(put, range(8)))
        assert won.count(True) == 1
        assert store.get(f"race-{turn}") == b"%d" % won.index(True)


@pytest.mark.parametrize(
    "key", ["a b/c d.bin", "größe/äöü.pt", "模型/权重.safetensors", "a+b/%2F&=?#[1].bin", "x/" + "y" * 200, "dots/..hidden...x"]
)
def test_keys_may_hold_spaces_and_any_letters(store: Store, source: Source, key: str) -> None:
    source.put(store, key, b"weights")
    assert [found.key for found in store.list("")] == [key]
    assert [found.key for found in store.list(key[:3])] == [key]
    assert list(store.list_folders()) == [key.split("/")[0]]
    assert read_all(store, key) == b"weights"
    store.delete([key])
    assert list(store.list("")) == []


@pytest.mark.parametrize("size_bytes", [0, 1, 4096, 3 * MIB + 17])
def test_a_file_arrives_as_it_is_on_disk(store: Store, source: Source, size_bytes: int) -> None:
    wanted = content(size_bytes)
    with source.of(wanted) as body:
        stored = store.put_file(KEY, body)
        assert body.crc64nvme == checksum(wanted)
    assert stored.size_bytes == size_bytes
    assert store.stat(KEY) == stored
    assert read_all(store, KEY) == wanted


def test_several_files_are_under_way_at_once_in_one_thread(store: Store, source: Source) -> None:
    wanted = {f"{KEY}-{size_bytes}": content(size_bytes) for size_bytes in (0, 1, 4096, 300_000)}
    with ExitStack() as sent:
        bodies = {key: sent.enter_context(source.of(bytes_)) for key, bytes_ in wanted.items()}
        answered = {key: sent.enter_context(store.putting_file(key, body)) for key, body in bodies.items()}
        stored = {key: stored() for key, stored in reversed(answered.items())}
        assert {key: body.crc64nvme for key, body in bodies.items()} == {key: checksum(it) for key, it in wanted.items()}
    assert stored == {key: store.stat(key) for key in wanted}
    with ExitStack() as asked:
        opened = {key: asked.enter_context(store.reading(key, length=len(it))) for key, it in wanted.items()}
        came = {}
        for key, body in reversed(opened.items()):
            came[key] = bytearray(len(wanted[key]) + 1)
            del came[key][filled(body(), came[key]) :]
    assert came == wanted


def test_an_object_that_is_missing_or_shorter_is_told_when_its_answer_is_waited_for(store: Store, source: Source) -> None:
    source.put(store, KEY, b"0123")
    with pytest.raises(NotFound), store.reading(f"{KEY}-missing", length=4) as opened:
        opened()
    with pytest.raises(CorruptObject), store.reading(KEY, length=5) as opened:
        opened()


def filled(body: Readable, buffer: bytearray) -> int:
    """Read to the end, and return how many bytes came."""
    done = 0
    while count := body.readinto(memoryview(buffer)[done:]):
        done += count
    return done


def test_a_slice_of_a_file_arrives_without_its_surroundings(store: Store, source: Source) -> None:
    with source.of(b"0123456789", offset=3, size_bytes=4) as body:
        store.put_file(KEY, body)
    assert store.get(KEY) == b"3456"


def test_a_body_that_was_read_before_is_sent_from_its_beginning(store: Store, source: Source) -> None:
    with source.of(b"0123456789") as body:
        body.read(4)
        store.put_file(KEY, body)
    assert store.get(KEY) == b"0123456789"


class Slow(OpenGate):
    """Lets a block pass every 50 ms, so that a transfer is under way when it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.passed = 0

    def pass_through(self, size_bytes: int) -> None:
        super().pass_through(size_bytes)
        if size_bytes:
            self.passed += 1
            time.sleep(0.05)


@pytest.mark.parametrize("in_parts", [False, True])
def test_closing_the_gate_stops_a_transfer_within_a_second(store: Store, source: Source, in_parts: bool) -> None:
    gate = Slow()
    upload_id = store.begin_upload(KEY) if in_parts else ""
    with source.of(content(64 * MIB), gate=gate) as body, ThreadPoolExecutor(1) as sender:
        sent = (
            sender.submit(store.upload_part, KEY, upload_id, 1, body) if in_parts else sender.submit(store.put_file, KEY, body)
        )
        while not gate.passed:
            time.sleep(0.01)
        gate.close()
        closed_s = time.monotonic()
        with pytest.raises(Stopped):
            sent.result(timeout=10)
        assert time.monotonic() - closed_s < SOON_S
    assert list(store.list("")) == []
    assert store.put("still", b"works").size_bytes == 5


def test_a_file_that_became_shorter_is_reported_as_changed(store: Store, source: Source) -> None:
    store.put(KEY, b"what was there before")
    with source.of(content(3 * MIB)) as body:
        os.truncate(f"/proc/self/fd/{body.fd}", MIB)
        began_s = time.monotonic()
        with pytest.raises(CheckpointChanged):
            store.put_file(KEY, body)
        assert time.monotonic() - began_s < SOON_S
    assert store.get(KEY) == b"what was there before"


def test_a_file_rewritten_after_it_was_sent_is_sent_anew(store: Store, source: Source) -> None:
    source.put(store, KEY, b"step 20")
    before = store.stat(KEY)
    source.put(store, KEY, b"step 21")
    assert store.stat(KEY).etag != before.etag
    assert store.get(KEY) == b"step 21"


def test_a_range_is_read_and_nothing_more(store: Store, source: Source) -> None:
    wanted = content(MIB)
    source.put(store, KEY, wanted)
    for offset, length in ((0, 1), (0, MIB), (MIB - 1, 1), (1000, 70_000), (500, None), (MIB, None), (MIB, 0), (0, 0)):
        end = None if length is None else offset + length
        assert read_all(store, KEY, offset=offset, length=length) == wanted[offset:end]


def test_an_empty_object_is_read_as_nothing(store: Store) -> None:
    store.put(KEY, b"")
    assert read_all(store, KEY) == b""
    assert read_all(store, KEY, offset=0, length=0) == b""


@pytest.mark.parametrize(("offset", "length"), [(0, 11), (5, 6), (10, 1), (11, 1), (11, None), (50, 0)])
def test_a_range_beyond_the_end_is_corrupt(store: Store, offset: int, length: int | None) -> None:
    store.put(KEY, b"0123456789")
    with pytest.raises(CorruptObject):
        read_all(store, KEY, offset=offset, length=length)


@pytest.mark.parametrize("length", [None, 0, 3])
def test_an_object_replaced_since_is_corrupt(store: Store, length: int | None) -> None:
    before = store.put(KEY, b"before")
    assert read_all(store, KEY, etag=before.etag, length=length) == b"before"[:length]
    store.put(KEY, b"after!")
    with pytest.raises(CorruptObject):
        read_all(store, KEY, etag=before.etag, length=length)


def test_what_a_reader_does_wrong_is_not_taken_for_the_stores_fault(store: Store) -> None:
    store.put(KEY, b"0123456789")
    with pytest.raises(ZeroDivisionError), store.read(KEY):
        raise ZeroDivisionError
    with pytest.raises(PermissionError), store.read(KEY):
        raise PermissionError("the volume's, not the store's")


def test_a_reader_may_leave_early(store: Store, source: Source) -> None:
    source.put(store, KEY, content(4 * MIB))
    for _ in range(20):  # more than there are connections
        with store.read(KEY) as body:
            body.readinto(memoryview(bytearray(10)))
    assert store.stat(KEY).size_bytes == 4 * MIB


def test_deleting_what_is_not_there_is_no_error(store: Store) -> None:
    store.put("a/1", b"")
    store.delete(["a/1", "a/2", "never/was"])
    store.delete(["a/1"])
    store.delete([])
    assert list(store.list("")) == []


def test_folders_are_the_first_parts_of_keys(store: Store) -> None:
    for key in ("run.json", "final/.complete", "checkpoint-2/a/b/c", "checkpoint-2/x", "checkpoint-10/x"):
        store.put(key, b"")
    assert sorted(store.list_folders()) == ["checkpoint-10", "checkpoint-2", "final"]
    store.delete(["checkpoint-2/a/b/c", "checkpoint-2/x"])
    assert sorted(store.list_folders()) == ["checkpoint-10", "final"]


def test_folders_below_a_folder_are_the_next_parts_of_keys(store: Store) -> None:
    for key in ("a/run.json", "a/checkpoint-2/x", "a/checkpoint-2/y", "a/final/x", "ab/checkpoint-3/x"):
        store.put(key, b"")
    assert sorted(store.list_folders("a/")) == ["checkpoint-2", "final"]
    assert sorted(store.list_folders("ab/")) == ["checkpoint-3"]


def test_a_prefix_of_a_list_is_a_prefix_of_the_key(store: Store) -> None:
    for key in ("checkpoint-2/x", "checkpoint-20/x", "checkpoint-20/y/z", "checkpoint-200/x"):
        store.put(key, b"")
    assert [found.key for found in store.list("checkpoint-20/")] == ["checkpoint-20/x", "checkpoint-20/y/z"]
    assert [found.key for found in store.list("checkpoint-20")] == ["checkpoint-20/x", "checkpoint-20/y/z", "checkpoint-200/x"]
    assert [found.key for found in store.list("nothing/")] == []


def test_a_store_does_not_see_its_neighbours(backend: Backend) -> None:
    mine, other = backend.open("a"), backend.open("ab")
    mine.probe(), other.probe()
    other.put("checkpoint-1/x", b"theirs")
    upload_id = other.begin_upload("checkpoint-1/y")
    assert list(mine.list("")) == []
    assert list(mine.list_folders()) == []
    assert list(mine.pending_uploads("")) == []
    other.abort_upload("checkpoint-1/y", upload_id)


@ON_EACH_LISTING
@pytest.mark.slow
def test_more_objects_than_a_page_are_listed_and_deleted(backend: Backend, store: Store) -> None:
    count = 1003 if backend.kind != "rgw" else 1001
    keys = [f"checkpoint-7/shard-{n:05d}.bin" for n in range(count)]
    with ThreadPoolExecutor(8) as writers:
        list(writers.map(lambda key: store.put(key, b""), keys))
    assert [found.key for found in store.list("checkpoint-7/")] == keys
    store.delete(keys)
    assert list(store.list("")) == []


@ON_EACH_LISTING
@pytest.mark.slow
def test_more_parts_than_a_page_are_listed(backend: Backend, store: Store, source: Source) -> None:
    upload_id = store.begin_upload(KEY)
    with ThreadPoolExecutor(8) as senders:
        parts = list(senders.map(lambda number: source.part(store, KEY, upload_id, number, b"x"), range(1, 1004)))
    assert list(store.list_parts(KEY, upload_id)) == parts
    store.abort_upload(KEY, upload_id)


def test_writers_and_readers_at_once_never_see_half_an_object(backend: Backend, store: Store) -> None:
    # moto closes the file of an object that is replaced, also while that is read.
    ends_a_read = suppress(StoreUnavailable) if backend.kind in ("moto", "checking") else nullcontext()
    texts = [bytes([letter]) * 50_000 for letter in b"abcd"]
    store.put(KEY, texts[0])
    over = threading.Event()

    def write(text: bytes) -> None:
        while not over.is_set():
            store.put(KEY, text)

    with ThreadPoolExecutor(4) as writers:
        for text in texts:
            writers.submit(write, text)
        try:
            for _ in range(60):
                with ends_a_read:
                    assert store.get(KEY) in texts
        finally:
            over.set()


def test_errors_of_a_store_are_of_one_family(store: Store) -> None:
    with pytest.raises(StoreError) as caught:
        store.get("missing")
    assert "missing" in str(caught.value)
