"""Copies that a store makes itself, without sending the bytes to the sidecar."""

from __future__ import annotations

import pytest

from sidecar.errors import CorruptObject, NotFound
from sidecar.store.protocol import Store
from tests.store.conftest import Source, read_all
from tests.store.test_conformance import KEY, PART, content


def test_a_copy_has_the_content_of_its_source_and_an_etag_of_its_own(store: Store, source: Source) -> None:
    there = source.put(store, KEY, content(PART)) or store.stat(KEY)
    copied = store.copy(KEY, "checkpoint-40/model.safetensors", etag=there.etag)
    assert copied == store.stat("checkpoint-40/model.safetensors")
    assert read_all(store, copied.key) == content(PART)
    store.delete([KEY])
    assert read_all(store, copied.key) == content(PART)


def test_a_copy_of_what_was_replaced_is_refused(store: Store) -> None:
    before = store.put(KEY, b"before")
    store.put(KEY, b"after")
    with pytest.raises(CorruptObject):
        store.copy(KEY, "checkpoint-40/x", etag=before.etag)
    with pytest.raises(NotFound):
        store.stat("checkpoint-40/x")


def test_a_copy_of_nothing_is_not_found(store: Store) -> None:
    with pytest.raises(NotFound):
        store.copy("checkpoint-1/nothing", "checkpoint-2/nothing", etag="e")
