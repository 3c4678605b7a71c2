"""When a commit is looked at again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sidecar.core.lifecycle.states import State
from sidecar.transfer.clock import Clock
from sidecar.transfer.executor import StoreExecutor
from sidecar.upload.commit.post_commit_check import AFTER_S, LATE_S, REPEATED_S, PostCommitCheck
from tests.store.memory import MemoryStore
from tests.upload.parts import executor, uploads
from tests.upload.test_job import finished


class Checked:
    """A durable checkpoint, and the checks of its commit; ``stands``: their result."""

    def __init__(self, threads: StoreExecutor) -> None:
        self.now_s, self.stands = 0.0, True
        context = uploads(MemoryStore(), threads)
        context.committer.is_still_committed = self._answer  # type: ignore[method-assign]
        self.check = PostCommitCheck(
            context.catalog, context.committer, context.deadline, clock=Clock(monotonic=lambda: self.now_s)
        )
        self.catalog = context.catalog
        self.tracked = context.catalog.finished(finished(), held=True)

    def become_durable(self) -> None:
        self.catalog.durable(self.tracked, at_s=1.9e9)
        self.check.became_durable(self.tracked)

    async def next_check(self) -> float:
        """Wait for the next check; return the seconds until it."""
        before_s, self.now_s = self.now_s, min(due_s for due_s, _, _ in self.check._due)
        await self.check._check_due()
        return self.now_s - before_s

    async def _answer(self, *_: object, **__: object) -> bool:
        return self.stands


@pytest.fixture
def checked() -> Iterator[Checked]:
    with executor(concurrency=2) as threads:
        yield Checked(threads)


async def test_each_time_that_a_commit_was_gone_the_next_check_comes_later(checked: Checked) -> None:
    """Two attempts replaced each other's commits: neither had the time to finish."""
    checked.stands = False
    waits_s = []
    for _ in range(6):
        checked.become_durable()
        waits_s.append(await checked.next_check())
        assert checked.tracked.state is State.FINISHED
        checked.check._due.clear()
    assert waits_s == [AFTER_S[0][0] * factor for factor in (1, 2, 4, 8, 16, 16)]


async def test_a_commit_that_is_deleted_long_after_it_was_written_is_noticed(checked: Checked) -> None:
    checked.become_durable()
    due_s = [at_s for at_s, _ in (*AFTER_S, *LATE_S)]
    waits_s = [later_s - before_s for before_s, later_s in zip((0.0, *due_s), due_s, strict=False)]
    assert [await checked.next_check() for _ in range(6)] == [*waits_s, REPEATED_S, REPEATED_S]
    checked.stands = False
    assert await checked.next_check() == REPEATED_S
    assert checked.tracked.state is State.FINISHED


async def test_a_checkpoint_that_becomes_durable_again_and_again_is_not_checked_more_often(checked: Checked) -> None:
    for _ in range(3):
        checked.become_durable()
        checked.now_s += LATE_S[-1][0]
        await checked.check._check_due()
    assert len(checked.check._due) == 1
