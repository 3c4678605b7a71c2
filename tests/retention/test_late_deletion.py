"""A store that takes a deletion long after it was asked: what justified the deletion may be gone by then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest

from sidecar.errors import AccessRefused
from sidecar.transfer.executor import StoreExecutor
from sidecar.transfer.health import Health
from sidecar.transfer.rate_gate import RateGate
from tests.retention.test_store_retention import Kept
from tests.store.memory import MemoryStore


class Denying(MemoryStore):
    """Denies the first deletion, and takes the next one an hour later, after something else happened."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: Callable[[], None] | None = None

    def delete(self, keys: Iterable[str]) -> None:
        if self.meanwhile is not None:
            happened, self.meanwhile = self.meanwhile, None
            happened()
            raise AccessRefused("DeleteObjects was denied", code="AccessDenied")
        super().delete(keys)


@pytest.fixture
def executor() -> Iterator[StoreExecutor]:
    running = StoreExecutor(concurrency=2, gate=RateGate(None), health=Health())
    yield running
    running.close()


@pytest.mark.parametrize(("is_lost", "left"), [(True, {10, 20}), (False, {20})])
async def test_a_deletion_that_is_taken_late_needs_the_newer_commits_still(
    is_lost: bool, left: set[int], executor: StoreExecutor
) -> None:
    store = Denying()
    kept = Kept(executor, 1, store)
    for step in (10, 20):
        kept.commit(step)

    def hours_pass() -> None:
        kept.now_s += 3600.0
        if is_lost:  # as by a lifecycle rule
            store.delete(["checkpoint-20/model"])

    store.meanwhile = hours_pass
    assert await kept.run_once() == left


async def test_a_deletion_that_is_taken_late_leaves_the_step_that_a_resume_has_chosen(executor: StoreExecutor) -> None:
    store = Denying()
    kept = Kept(executor, 1, store)
    for step in (10, 20):
        kept.commit(step)
    store.meanwhile = lambda: kept.protected.add("checkpoint-10")
    assert await kept.run_once() == {10, 20}
