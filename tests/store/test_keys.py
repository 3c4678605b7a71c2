"""Keys that are hard to carry: through paths, signatures, XML, listings and the names of a file system.

The behaviours are those of S3 (user guide, "Naming Amazon S3 objects") and of ceph/s3-tests. Where a store takes no such key,
our layer says so with an error that names the key; it never reads, lists or deletes another one instead.
"""

from __future__ import annotations

import contextlib

import pytest

from sidecar.core.format.checksum import checksum
from sidecar.errors import NotFound, StoreError
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
    "a control character": "checkpoint-1/a\x01\x1b[31mb",
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


def check_round_trip(store: Store, source: Source, key: str) -> None:
    content = repr(key).encode()
    source.put(store, key, content)
    stored = store.stat(key)
    assert stored.key == key
    assert [found.key for found in store.list("")] == [key]
    assert [found.key for found in store.list(key)] == [key]
    assert store.get(key) == read_all(store, key, etag=stored.etag) == content
    copied = store.copy(key, f"copy/{key}", etag=stored.etag)
    assert store.get(copied.key) == content
    with pytest.raises(NotFound):
        store.stat(f"{key}x")
    store.delete([key, copied.key])
    assert list(store.list("")) == []
    upload_id = store.begin_upload(key)
    part = source.part(store, key, upload_id, 1, content)
    assert [each.number for each in store.list_parts(key, upload_id)] == [1]
    assert key in [pending.key for pending in store.pending_uploads(key)]
    store.complete_upload(key, upload_id, [part], crc64nvme=checksum(content))
    assert store.get(key) == content
    store.delete([key])
    assert list(store.list("")) == []


@pytest.mark.parametrize("key", [pytest.param(key, id=name) for name, key in (PLAIN | CONTROL | PATHS).items()])
def test_a_key_comes_back_as_it_was(key: str, store: Store, source: Source) -> None:
    check_round_trip(store, source, key)
