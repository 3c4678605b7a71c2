"""A deletion in the store that a process began and did not end is finished by a later one, and nothing else is deleted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest

from sidecar.core.format import keys
from sidecar.errors import StoreFull
from sidecar.store.protocol import Stored
from sidecar.transfer.executor import StoreExecutor
from tests.retention.test_store_retention import Kept, executor
from tests.store.memory import MemoryStore

__all__ = ["executor"]

GONE = "checkpoint-10"


class Ended(Exception):
    """The process was killed."""


class TimedStore(MemoryStore):
    """Lists the times of writes, as numbers that grow; ends the process at a deletion."""

    def __init__(self) -> None:
        super().__init__()
        self.ends_at: int | None = None
        """How many further requests for deletions are answered; ``None``: all."""
        self.is_full = False

    def put(self, key: str, content: bytes, *, only_if_absent: bool = False) -> Stored:
        if self.is_full:
            raise StoreFull("the bucket is full")
        return super().put(key, content, only_if_absent=only_if_absent)

    def list(self, prefix: str) -> Iterator[Stored]:
        return (replace(each, modified=f"{self._objects[each.key].number:09}") for each in super().list(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        super().delete(keys)
        if self.ends_at is not None:
            self.ends_at -= 1
            if self.ends_at == 0:
                self.ends_at = None
                raise Ended


async def interrupted(executor: StoreExecutor, ends_at: int) -> tuple[TimedStore, Kept]:
    """Return a store with what a deletion of step 10 has left, and the next life's retention."""
    store = TimedStore()
    kept = Kept(executor, 1, store)
    for step in (10, 20):
        kept.commit(step)
    store.ends_at = ends_at
    with pytest.raises(Ended):
        await kept.run_once()
    assert list(store.list(GONE)), "something is left"
    kept.start()
    kept.known.pending = set()
    return store, kept


def folders(store: MemoryStore) -> set[str]:
    return set(store.list_folders())


@pytest.mark.parametrize("ends_at", [1, 2, 3], ids=["after the commit", "after the manifests", "after the files"])
async def test_a_later_life_finishes_what_an_earlier_one_began_to_delete(ends_at: int, executor: StoreExecutor) -> None:
    store, kept = await interrupted(executor, ends_at)
    assert await kept.run_once() == {20}
    assert folders(store) == {"checkpoint-20"}


def _file(store: TimedStore, kept: Kept) -> None:
    store.put(keys.shared_file(GONE, "model"), b"10")


def _another_file(store: TimedStore, kept: Kept) -> None:
    store.put(keys.shared_file(GONE, "tokenizer"), b"10")


def _commit(store: TimedStore, kept: Kept) -> None:
    store.put(keys.commit(GONE), b"of a broken writer")


def _later_commit(store: TimedStore, kept: Kept) -> None:
    store.put(keys.commit(GONE), b'{"format": 2}')


def _later_record(store: TimedStore, kept: Kept) -> None:
    store.put(keys.deletion(GONE), b'{"format": 2, "last_write": "999999999"}')


def _without_record(store: TimedStore, kept: Kept) -> None:
    store.delete([keys.deletion(GONE)])


def _pending(store: TimedStore, kept: Kept) -> None:
    kept.known.pending = {GONE}


@pytest.mark.parametrize("meanwhile", [_file, _another_file, _commit, _later_commit, _later_record, _without_record, _pending])
@pytest.mark.parametrize("ends_at", [1, 2])
async def test_what_may_be_written_now_stays_as_it_is(
    ends_at: int, meanwhile: Callable[[TimedStore, Kept], None], executor: StoreExecutor
) -> None:
    store, kept = await interrupted(executor, ends_at)
    meanwhile(store, kept)
    before = list(store.list(GONE))
    assert await kept.run_once() >= {20}
    assert list(store.list(GONE)) == before


async def test_a_full_store_is_cleaned_although_it_takes_no_record(executor: StoreExecutor) -> None:
    store = TimedStore()
    kept = Kept(executor, 1, store)
    for step in (10, 20):
        kept.commit(step)
    store.is_full = True
    assert await kept.run_once() == {20}
    assert folders(store) == {"checkpoint-20"}
