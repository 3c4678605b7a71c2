"""Revocations whose deletion did not do what it said."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from sidecar.transfer.executor import StoreExecutor
from tests.store.memory import MemoryStore
from tests.upload.commit.test_committer import COMMIT, NAME, Pod, executor

__all__ = ["executor"]


class OtherKey(MemoryStore):
    """A store that compares no checksums of requests: a bit of the first deletion flips on its way, in the key."""

    def __init__(self, *, commits_again: bool) -> None:
        super().__init__()
        self.commits_again, self.is_over = commits_again, False

    def delete(self, keys: Iterable[str]) -> None:
        wanted = list(keys)
        if self.is_over or wanted != [COMMIT]:
            super().delete(wanted)
            return
        self.is_over = True
        content = self.get(COMMIT)
        super().delete([COMMIT if self.commits_again else COMMIT + "x"])
        if self.commits_again:  # another node, which had seen all manifests
            self.put(COMMIT, content)


@pytest.mark.parametrize("commits_again", [False, True])
async def test_no_manifest_goes_before_its_commit_is_gone(commits_again: bool, executor: StoreExecutor) -> None:
    store = OtherKey(commits_again=commits_again)
    pod = Pod(store, executor, 0, count=1)
    await pod.publish(b"v1", "a")
    await pod.committer.try_commit(pod.checkpoint("a"))
    assert not await pod.committer.revoke_commit(NAME)
    assert {COMMIT, pod.key("a")} <= {stored.key for stored in store.list("")}
    assert await pod.committer.revoke_commit(NAME)
    assert not {COMMIT, pod.key("a")} & {stored.key for stored in store.list("")}
