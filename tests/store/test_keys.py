"""Keys that are hard to carry: through paths, signatures, XML, listings and the names of a file system.

The behaviours are those of S3 (user guide, "Naming Amazon S3 objects") and of ceph/s3-tests. Where a store takes no such key,
our layer says so with an error that names the key; it never reads, lists or deletes another one instead.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest

from sidecar.core.format.checksum import checksum
from sidecar.errors import ImpossibleKey, NotFound, StoreError, StoreUnavailable
from sidecar.store.protocol import Store
from tests.store.conftest import Backend, Source, read_all

PLAIN = {
    "a leading space": "checkpoint-1/ x",
    "a trailing space": "checkpoint-1/x ",
    "two spaces": "checkpoint-1/a  b",
    "a space as a name": "checkpoint-1/ /x",
    "a plus": "checkpoint-1/a+b c",
    "a percent sign": "checkpoint-1/100%",
    "what looks escaped": "checkpoint-1/%41%2F%2e%2E%zz%25",
    "a query": "checkpoint-1/a?versionId=1&b=c",
    "a fragment": "checkpoint-1/a#b",
    "delimiters": "checkpoint-1/!$&'()*+,;=:@[]~^`{|}",
    "quotes": 'checkpoint-1/"a\'b"',
    "XML": "checkpoint-1/<Key>&amp;</Key>]]>",
    "a backslash": "checkpoint-1/a\\b",
    "dots in names": "checkpoint-1/...x/..y/z..",
    "a hyphen like an option": "checkpoint-1/-rf",
    "a letter of four bytes": "checkpoint-1/🦀/模型.bin",
    "a composed letter": "checkpoint-1/\u00e9",
    "a decomposed letter": "checkpoint-1/e\u0301",
    "a byte order mark": "checkpoint-1/\ufeffx",
    "a line separator": "checkpoint-1/a\u2028b\u0085c",
    "right to left": "checkpoint-1/\u202eabc",
}
CONTROL = {
    "a newline": "checkpoint-1/a\nb",
    "a trailing newline": "checkpoint-1/ab\n",
    "a carriage return": "checkpoint-1/a\rb\r\nc",
    "a tab": "checkpoint-1/a\tb",
    "delete": "checkpoint-1/a\x7fb",
}
PATHS = {
    "an empty name": "checkpoint-1//x",
    "a leading slash": "/x",
    "a trailing slash": "checkpoint-1/x/",
    "a dot": "checkpoint-1/./x",
    "two dots": "checkpoint-1/../x",
    "a leading dot": "./x",
    "a trailing dot": "checkpoint-1/.",
}


def check_round_trip(store: Store, source: Source, key: str, *, in_parts: bool = True, copied: bool = True) -> None:
    content = repr(key).encode()
    source.put(store, key, content)
    stored = store.stat(key)
    assert stored.key == key
    assert [found.key for found in store.list("")] == [key]
    assert [found.key for found in store.list(key)] == [key]
    assert store.get(key) == read_all(store, key, etag=stored.etag) == content
    if copied:
        assert store.get(store.copy(key, f"copy/{key}", etag=stored.etag).key) == content
        with pytest.raises(NotFound):
            store.stat(f"{key}x")
    store.delete([key, f"copy/{key}"] if copied else [key])
    assert list(store.list("")) == []
    if not in_parts:
        return
    upload_id = store.begin_upload(key)
    part = source.part(store, key, upload_id, 1, content)
    assert [each.number for each in store.list_parts(key, upload_id)] == [1]
    assert key in [pending.key for pending in store.pending_uploads(key)]
    store.complete_upload(key, upload_id, [part], crc64nvme=checksum(content))
    assert store.get(key) == content
    store.delete([key])
    assert list(store.list("")) == []


REFUSED = {
    "file": set(PATHS),
    "minio": set(PATHS) - {"a trailing slash"},
}
"""Paths that a store has no place for. Others keep them as they are, like S3."""
LONGEST_BYTES = 1024


def takes(backend: Backend, key: str) -> bool:
    """Whether a server finds its way: moto has no route for a path of several lines."""
    return backend.kind not in ("moto", "checking") or not set("\n\r") & set(key)


@contextlib.contextmanager
def about(key: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"key: {key!r}")
        raise


@pytest.mark.parametrize("keys", [PLAIN, CONTROL], ids=["plain", "control"])
def test_keys_come_back_as_they_were(keys: dict[str, str], backend: Backend, store: Store, source: Source) -> None:
    for key in keys.values():
        with about(key):
            if takes(backend, key):
                check_round_trip(store, source, key)
                continue
            with pytest.raises(StoreUnavailable, match="404 without an error of S3"):
                source.put(store, key, b"content")


def test_paths_are_kept_as_they_are_or_refused_and_never_become_others(backend: Backend, store: Store, source: Source) -> None:
    for name, key in PATHS.items():
        with about(key):
            if name in REFUSED.get(backend.kind, ()):
                check_refused(store, source, key)
            else:
                check_round_trip(store, source, key, in_parts=(backend.kind, name) != ("minio", "a trailing slash"))


def check_refused(store: Store, source: Source, key: str) -> None:
    store.put("checkpoint-1/x", b"another")
    store.put("x", b"another")
    for call in (
        lambda: store.put(key, b"content"),
        lambda: source.put(store, key, b"content"),
        lambda: store.get(key),
        lambda: store.begin_upload(key),
    ):
        with pytest.raises(StoreError):
            call()
    with contextlib.suppress(StoreError):
        store.delete([key])
    assert [store.get(found.key) for found in store.list("")] == [b"another"] * 2
    store.delete(["checkpoint-1/x", "x"])


def test_a_control_character_that_xml_cannot_carry_is_kept_and_deleted(backend: Backend, store: Store, source: Source) -> None:
    key = "checkpoint-1/a\x01\x1b[31mb"
    if backend.kind == "rgw":  # Ceph RGW 16 takes it, and then answers 500 to each listing of it: never "it is not there"
        source.put(store, key, b"content")
        with pytest.raises(StoreUnavailable):
            store.stat(key)
        store.delete([key])
        assert list(store.list("")) == []
        return
    source.put(store, key, b"content")
    store.put("checkpoint-1/x", b"")
    assert {found.key for found in store.list("")} == {key, "checkpoint-1/x"}
    assert store.get(key) == read_all(store, key, etag=store.stat(key).etag) == b"content"
    store.delete([key, "checkpoint-1/x"])
    assert list(store.list("")) == []


def test_all_odd_keys_are_deleted_at_once(backend: Backend, store: Store) -> None:
    keys = {key for key in (*PLAIN.values(), *CONTROL.values()) if takes(backend, key)}
    for key in keys:
        store.put(key, b"")
    store.put("checkpoint-1/stays", b"")
    store.delete(keys)
    assert [found.key for found in store.list("")] == ["checkpoint-1/stays"]


@pytest.mark.parametrize("too_long", [False, True])
def test_the_longest_key_is_taken_and_a_longer_one_refused(
    too_long: bool, backend: Backend, store: Store, source: Source
) -> None:
    root = store.url.partition("://")[2].partition("/")[2] + "/"
    left = LONGEST_BYTES - len(root.encode()) - len("ä".encode()) + too_long
    segments = ["n" * 200] * (left // 201)
    key = "/".join([*segments, "ä" + "z" * (left - 201 * len(segments))])
    if too_long and backend.kind in ("rgw", "minio"):
        for write in (lambda: source.put(store, key, b"content"), lambda: store.put(key, b""), lambda: store.begin_upload(key)):
            with pytest.raises(ImpossibleKey, match=re.escape(key[:50])):
                write()
        assert list(store.list("")) == []
        return
    check_round_trip(store, source, key, copied=False)


FOLDERS = ["a b", "a+b", "100%", "%41", "a?b", "a#b", "ä", "a\u0308", "<x>&", "a\nb", "模型", "'\""]


def test_folders_of_odd_names_are_listed_as_they_are(backend: Backend, store: Store) -> None:
    folders = [folder for folder in FOLDERS if takes(backend, folder)]
    for folder in folders:
        store.put(f"{folder}/x", b"")
        store.put(f"below/{folder}/x/y", b"")
    assert sorted(store.list_folders()) == sorted([*folders, "below"])
    assert sorted(store.list_folders("below/")) == sorted(folders)
    for folder in folders:
        assert list(store.list_folders(f"below/{folder}/")) == ["x"]
        assert [found.key for found in store.list(f"{folder}/")] == [f"{folder}/x"]
