"""Requests of documents that reach the store late, a second time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from sidecar.core.commit.commit import ReadyToCommit
from sidecar.core.format import keys
from sidecar.errors import AlreadyExists
from sidecar.store.protocol import Stored
from sidecar.transfer.executor import StoreExecutor
from tests.store.memory import MemoryStore
from tests.upload.commit.test_committer import NAME, Pod, executor

__all__ = ["executor"]


class Repeating(MemoryStore):
    """A store that gets the first manifest a second time when ``again`` is called: a hedge, or a retry, that arrives late."""

    def __init__(self) -> None:
        super().__init__()
        self._first: Callable[[], Stored] | None = None

    def put(self, key: str, content: bytes, *, only_if_absent: bool = False) -> Stored:
        if key.startswith(keys.manifests(NAME)) and self._first is None:
            self._first = partial(super().put, key, content, only_if_absent=only_if_absent)
        return super().put(key, content, only_if_absent=only_if_absent)

    def again(self) -> None:
        assert self._first
        with suppress(AlreadyExists):
            self._first()


async def test_a_late_request_of_a_nodes_first_manifest_does_not_replace_the_one_that_was_committed(
    executor: StoreExecutor,
) -> None:
    """A node's file got another key, since another node used its name: its manifest was rewritten, and the first came back."""
    store = Repeating()
    pod = Pod(store, executor, 0, count=1)
    await pod.publish(b"v1", "a")
    await pod.publish(b"v1", "a", path="shard-of-its-own")
    assert isinstance(await pod.committer.try_commit(pod.checkpoint("a")), ReadyToCommit)
    store.again()
    there = await pod.committer.stored_commit(NAME)
    assert there is not None
    assert there.commit is not None
    assert not await pod.committer.damaged(there.commit)
