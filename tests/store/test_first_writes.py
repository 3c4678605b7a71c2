"""Files that every store refuses whose key has an object, if it can."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from sidecar.core.format.checksum import checksum
from sidecar.errors import AlreadyExists, StoreUnavailable
from sidecar.store.protocol import Capabilities, Store
from tests.store.conftest import Source, read_all
from tests.store.test_conformance import KEY, MIB, content


@pytest.mark.parametrize("size_bytes", [0, 11, 300_000, 24 * MIB])
def test_a_file_for_an_absent_key_does_not_replace_an_object(
    opened: tuple[Store, Capabilities], source: Source, size_bytes: int
) -> None:
    store, capabilities = opened
    first, second = content(size_bytes, seed=1), content(size_bytes, seed=2) + b"!"
    with source.of(first) as body:
        stored = store.put_file(KEY, body, only_if_absent=True)
        assert body.crc64nvme == checksum(first)
    with source.of(second) as body:
        if not capabilities.conditional_files:
            store.put_file(KEY, body, only_if_absent=True)
            assert read_all(store, KEY) == second
            return
        for _ in range(2):  # over the same connection, if the server keeps it
            with pytest.raises(AlreadyExists):
                store.put_file(KEY, body, only_if_absent=True)
        assert store.stat(KEY) == stored
        assert read_all(store, KEY) == first
        replaced = store.put_file(KEY, body)
        assert body.crc64nvme == checksum(second)
    assert store.stat(KEY) == replaced
    assert read_all(store, KEY) == second


def test_a_refused_file_does_not_disturb_those_under_way_in_the_same_thread(
    opened: tuple[Store, Capabilities], source: Source
) -> None:
    store, capabilities = opened
    if not capabilities.conditional_files:
        pytest.skip("the store refuses no files")
    store.put(f"{KEY}-1", b"there before")
    with ExitStack() as sent:
        bodies = [sent.enter_context(source.of(b"file %d" % number)) for number in range(3)]
        answered = [
            sent.enter_context(store.putting_file(f"{KEY}-{number}", body, only_if_absent=True))
            for number, body in enumerate(bodies)
        ]
        answered[0]()
        with pytest.raises(AlreadyExists):
            answered[1]()
        answered[2]()
    assert [store.get(f"{KEY}-{number}") for number in range(3)] == [b"file 0", b"there before", b"file 2"]


def test_of_racing_files_for_an_absent_key_exactly_one_wins(opened: tuple[Store, Capabilities], source: Source) -> None:
    store, capabilities = opened
    if not capabilities.conditional_files:
        pytest.skip("the store refuses no files")
    start = threading.Barrier(4)

    def put(writer: int) -> bool:
        with source.of(b"%d" % writer * 100_000) as body:
            start.wait()
            try:
                store.put_file(KEY, body, only_if_absent=True)
            except (AlreadyExists, StoreUnavailable):  # 409: the store had not decided yet
                return False
        return True

    with ThreadPoolExecutor(4) as writers:
        won = list(writers.map(put, range(4)))
    assert won.count(True) == 1
    assert read_all(store, KEY) == b"%d" % won.index(True) * 100_000
