"""Listings: their order, their pages, what a prefix means, and that they show each write and deletion at once."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from sidecar.errors import AlreadyExists, NotFound
from sidecar.store.protocol import Store
from sidecar.store.s3.control import Control
from sidecar.store.s3.store import S3Store
from tests.store.conftest import ON_EACH_LISTING, ON_EACH_SERVER, Backend, Source

ODD = [
    "a",
    "a b",
    "a+b",
    "a%b",
    "a&b",
    "a-",
    "a.",
    "a/",
    "a/b",
    "a//",
    "a0",
    "A",
    "aa",
    "ä",
    "\uff21",
    "\U00010000",
    "~",
    "a\u0308",
]
"""Keys whose order differs by UTF-8, by UTF-16, by letters without case, and by how ``/`` is counted."""
PAGES = [1, 2, 3]


def odd_keys(backend: Backend) -> list[str]:
    """Return them in the order of S3: that of the bytes of UTF-8 (S3 user guide, "ListObjectsV2")."""
    # MinIO and folders keep objects below "a/" in a folder "a"; MinIO's pages end early at an object that is named "a/".
    taken = {"file": lambda key: not key.endswith("/") and key != "a", "minio": lambda key: key not in ("a", "a/", "a//")}
    return sorted(filter(taken.get(backend.kind), ODD), key=lambda key: f"k/{key}".encode())


@ON_EACH_SERVER
def test_keys_are_listed_in_the_order_of_their_bytes(backend: Backend, store: Store) -> None:
    keys = odd_keys(backend)
    for key in reversed(keys):
        store.put(f"k/{key}", b"")
    assert [found.key.removeprefix("k/") for found in store.list("k/")] == keys


@ON_EACH_SERVER
@pytest.mark.parametrize("prefix", ["a", "a+", "a ", "a%", "a/", "ä", "a\u0308", "A", "\U00010000", "none"])
def test_a_prefix_is_neither_decoded_nor_a_pattern(prefix: str, backend: Backend, store: Store) -> None:
    keys = odd_keys(backend)
    with ThreadPoolExecutor(8) as writers:
        list(writers.map(lambda key: store.put(f"k/{key}", b""), keys))
    assert [f.key for f in store.list(f"k/{prefix}")] == [f"k/{key}" for key in keys if key.startswith(prefix)]


@ON_EACH_SERVER
def test_a_page_may_end_at_any_key(backend: Backend, store: Store) -> None:
    """The token of the next page carries a key, or the end of a folder, whatever its letters."""
    if not isinstance(store, S3Store):
        pytest.skip("this store has no pages")
    keys = odd_keys(backend)
    for key in keys:
        store.put(f"k/{key}", b"")
    root = store.url.partition("://")[2].partition("/")[2] + "/k/"
    folders = sorted({key[: key.index("/") + 1] for key in keys if "/" in key})
    for most in PAGES:
        pages = list(store._clients.pages(Control.pages, root, most=most))
        assert [found.key.removeprefix(root) for page in pages for found in page.objects] == keys
        assert max(len(page.objects) for page in pages) <= most
        pages = list(store._clients.pages(Control.pages, root, delimiter="/", most=most))
        assert [name.removeprefix(root) for page in pages for name in page.prefixes] == folders
        flat = [found.key.removeprefix(root) for page in pages for found in page.objects]
        assert flat == [key for key in keys if "/" not in key]


@ON_EACH_LISTING
@pytest.mark.slow
def test_more_folders_than_a_page_are_each_listed_once(store: Store) -> None:
    """Common prefixes count as keys of a page, and one may hold more keys than a page."""
    names = [f"checkpoint-{number}" for number in range(1, 1051)]
    keys = [f"{name}/.complete" for name in names] + [f"checkpoint-7/shard-{number:04}" for number in range(1010)]
    keys += [f"between-{number:02}" for number in range(20)] + ["run.json"]
    with ThreadPoolExecutor(16) as writers:
        list(writers.map(lambda key: store.put(key, b""), keys))
    assert sorted(store.list_folders()) == sorted(names)
    assert [found.key for found in store.list("")] == sorted(keys)
    assert len(list(store.list("checkpoint-7/"))) == 1011
    store.delete(keys)
    assert list(store.list("")) == list(store.list_folders()) == []


def test_each_write_and_deletion_is_visible_at_once(store: Store, source: Source) -> None:
    for turn, size_bytes in enumerate((10, 0, 70_000, 1, 10)):
        content = bytes([turn]) * size_bytes
        source.put(store, "a/k", content)
        [listed] = store.list("")
        assert (listed.size_bytes, listed) == (size_bytes, store.stat("a/k"))
        assert store.get("a/k") == content
        assert list(store.list_folders()) == ["a"]
        if turn % 2:
            store.delete(["a/k"])
            assert list(store.list("")) == list(store.list_folders()) == []
            for look in (store.get, store.stat):
                with pytest.raises(NotFound):
                    look("a/k")


def test_a_conditional_put_succeeds_again_after_a_deletion_and_sees_every_kind_of_object(store: Store, source: Source) -> None:
    for turn in range(3):
        store.put("k", b"%d" % turn, only_if_absent=True)
        store.delete(["k"])
    for make in (
        lambda: store.put("k", b""),
        lambda: source.put(store, "k", b"file"),
        lambda: joined(store, source, "k", b"part"),
    ):
        make()
        there = store.stat("k")
        with pytest.raises(AlreadyExists):
            store.put("k", b"another", only_if_absent=True)
        assert store.stat("k") == there
        store.delete(["k"])


def joined(store: Store, source: Source, key: str, content: bytes) -> None:
    from sidecar.core.format.checksum import checksum

    upload_id = store.begin_upload(key)
    store.complete_upload(key, upload_id, [source.part(store, key, upload_id, 1, content)], crc64nvme=checksum(content))


@ON_EACH_SERVER
def test_between_a_conditional_put_and_a_deletion_there_is_one_object_or_none(store: Store) -> None:
    """Of a writer and a deleter that race, each sees the other's whole work or none of it."""
    start = threading.Barrier(3)

    def put(writer: int) -> bool:
        start.wait()
        try:
            store.put("k", b"%d" % writer * 1000, only_if_absent=True)
        except AlreadyExists:
            return False
        return True

    def delete() -> None:
        start.wait()
        store.delete(["k"])

    with ThreadPoolExecutor(3) as racers:
        for _ in range(5):
            puts = [racers.submit(put, writer) for writer in (1, 2)]
            racers.submit(delete).result()
            won = [writer for writer, done in zip((1, 2), puts, strict=True) if done.result()]
            there = [store.get(found.key) for found in itertools.islice(store.list("k"), 1)]
            assert won
            assert there in [[], *([b"%d" % writer * 1000] for writer in won)]
            store.delete(["k"])
