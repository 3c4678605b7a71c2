"""When a commit is looked at again."""

from __future__ import annotations

from pathlib import Path

from sidecar.core.lifecycle.states import State
from sidecar.transfer.clock import Clock
from sidecar.upload.commit.post_commit_check import AFTER_S, REPEATED_S, PostCommitCheck
from tests.store.memory import MemoryStore
from tests.upload.parts import executor, uploads
from tests.upload.test_job import finished


async def test_each_time_that_a_commit_was_gone_the_next_check_comes_later(tmp_path: Path) -> None:
    """Two attempts replaced each other's commits: neither had the time to finish."""
    now_s = 0.0
    with executor(concurrency=2) as threads:
        context = uploads(MemoryStore(), threads)
        check = PostCommitCheck(context.catalog, context.committer, context.pod, clock=Clock(monotonic=lambda: now_s))
        tracked = context.catalog.finished(finished(), held=True)
        waits_s = []
        for _ in range(6):
            context.catalog.durable(tracked, at_s=1.9e9)
            check.became_durable(tracked)
            first_s = min(due_s for due_s, _, _ in check._due)
            waits_s.append(first_s - now_s)
            context.committer.is_still_committed = _is_gone  # type: ignore[method-assign]
            now_s = first_s
            await check._check_due()
            assert tracked.state is State.FINISHED
            check._due.clear()
    assert waits_s == [AFTER_S[0][0] * factor for factor in (1, 2, 4, 8, 16, 16)]


async def test_the_newest_commit_is_looked_at_again_and_again(tmp_path: Path) -> None:
    """Somebody deletes it, long after it was written."""
    now_s = 0.0
    with executor(concurrency=2) as threads:
        context = uploads(MemoryStore(), threads)
        check = PostCommitCheck(context.catalog, context.committer, context.pod, clock=Clock(monotonic=lambda: now_s))
        tracked = context.catalog.finished(finished(), held=True)
        context.catalog.durable(tracked, at_s=1.9e9)
        check.became_durable(tracked)
        context.committer.is_still_committed = _stands  # type: ignore[method-assign]
        for due_s in (AFTER_S[0][0], AFTER_S[1][0], AFTER_S[1][0] + REPEATED_S):
            assert min(due_s for due_s, _, _ in check._due) == due_s
            now_s = due_s
            await check._check_due()
        context.committer.is_still_committed = _is_gone  # type: ignore[method-assign]
        now_s += REPEATED_S
        await check._check_due()
        assert tracked.state is State.FINISHED


async def _stands(*_: object, **__: object) -> bool:
    return True


async def _is_gone(*_: object, **__: object) -> bool:
    return False
