"""The lease of a prefix, on a real folder and a simulated clock."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from sidecar.catalog.events import Events
from sidecar.core.format import keys
from sidecar.core.lifecycle.fencing import ENDING_SILENCE_S, KEPT_CLAIMS, MOST_CLAIMS, Claim, Holder, claims_among
from sidecar.core.lifecycle.prefix_ownership import ASK_POLL_S, CHECK_S, SILENCE_S
from sidecar.errors import ConfigurationError, Fenced
from sidecar.lifecycle.prefix_lease import PrefixLease
from sidecar.lifecycle.run_document import claim, read
from sidecar.store.file.store import FileStore
from sidecar.transfer.clock import Clock
from sidecar.transfer.executor import StoreExecutor
from sidecar.transfer.health import Health
from sidecar.transfer.rate_gate import RateGate
from trainer_hook.contract import Node, TrainerState


class Pod:
    """A pod, with a clock of its own."""

    def __init__(
        self,
        store: FileStore,
        executor: StoreExecutor,
        name: str,
        *,
        job: str | None = "team/train",
        is_unique: bool = True,
        node: Node | None = None,
    ) -> None:
        self.store = store
        self.deadline_in_s: float | None = None
        self.now_s = 0.0
        self.on_sleep: Callable[[], Awaitable[None]] | None = None
        self.lease = PrefixLease(store, executor, self, clock=Clock(monotonic=lambda: self.now_s, sleep=self._sleep))
        holder = Holder(name, is_unique=is_unique, node=node or Node(), job=job, run_id=None)
        self.lease.begin(claim(store, run_id=None, job=job), holder)

    def left_s(self) -> float | None:
        return self.deadline_in_s

    def trainer(self) -> TrainerState | None:
        return None

    async def _sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.on_sleep is not None:
            await self.on_sleep()


@pytest.fixture
async def executor() -> AsyncIterator[StoreExecutor]:
    executor = StoreExecutor(concurrency=2, gate=RateGate(None), health=Health(Events()))
    yield executor
    executor.close()


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    store = FileStore(tmp_path / "store")
    store.probe()
    return store


async def test_the_later_pod_holds_the_prefix_and_the_earlier_one_learns_it_before_it_writes(
    store: FileStore, executor: StoreExecutor
) -> None:
    earlier, later = Pod(store, executor, "earlier"), Pod(store, executor, "later")
    await earlier.lease.settle()
    await earlier.lease.require_held()
    await later.lease.settle()
    await later.lease.require_held()
    with pytest.raises(Fenced, match=r"a later pod of this job \(later\)"):
        await earlier.lease.require_held()
    assert earlier.lease.fenced.is_set()
    assert (read(store).holder, read(store).epoch) == ("later", 2)
    with pytest.raises(Fenced):
        await earlier.lease.objection(Node(), "attempt")


async def test_a_restart_of_the_holder_keeps_its_epoch_and_what_it_declared(store: FileStore, executor: StoreExecutor) -> None:
    node = Node(0, 2)
    first = Pod(store, executor, "pod", node=node)
    await first.lease.settle()
    assert await first.lease.objection(node, "a") is None
    again = Pod(store, executor, "pod", node=node)
    await again.lease.settle()
    assert (read(store).epoch, read(store).attempts) == (1, ("a",))
    await first.lease.require_held()


async def test_a_fenced_pod_stays_fenced_and_a_machine_may_come_back(store: FileStore, executor: StoreExecutor) -> None:
    await Pod(store, executor, "one").lease.settle()
    await Pod(store, executor, "two").lease.settle()
    with pytest.raises(Fenced):
        await Pod(store, executor, "one").lease.settle()
    await Pod(store, executor, "one", is_unique=False).lease.settle()
    assert (read(store).holder, read(store).epoch) == ("one", 3)


async def test_of_many_that_take_over_at_once_one_holds_the_prefix_in_the_end(
    store: FileStore, executor: StoreExecutor
) -> None:
    pods = [Pod(store, executor, f"pod-{number}") for number in range(8)]
    await asyncio.gather(*(pod.lease.settle() for pod in pods), return_exceptions=True)
    held = await asyncio.gather(*(pod.lease.require_held() for pod in pods), return_exceptions=True)
    assert sum(each is None for each in held if not isinstance(each, Fenced)) == 1


async def test_a_pod_that_is_ending_is_waited_for_until_it_says_that_it_has_ended(
    store: FileStore, executor: StoreExecutor
) -> None:
    earlier, later = Pod(store, executor, "earlier"), Pod(store, executor, "later")
    await earlier.lease.settle()
    earlier.deadline_in_s = 50.0
    await earlier.lease.renew(1)
    waited_for = []

    async def beat_and_end() -> None:
        waited_for.append(later.lease.waits_for)
        if later.now_s < 3 * SILENCE_S:
            await earlier.lease.renew(2)
        else:
            await earlier.lease.require_held()
            await earlier.lease.release()

    later.on_sleep = beat_and_end
    await later.lease.wait_for_ending()
    assert 3 * SILENCE_S <= later.now_s <= 3 * SILENCE_S + 2
    assert "earlier" in waited_for[0]
    assert later.lease.waits_for is None


async def test_a_pod_that_died_while_it_was_ending_is_waited_for_until_it_is_silent(
    store: FileStore, executor: StoreExecutor
) -> None:
    earlier, later = Pod(store, executor, "earlier"), Pod(store, executor, "later")
    earlier.deadline_in_s = 500.0
    await earlier.lease.settle()
    await later.lease.wait_for_ending()
    assert ENDING_SILENCE_S <= later.now_s <= ENDING_SILENCE_S + 2


async def test_a_pod_that_is_ending_itself_leaves_the_earlier_one_half_of_its_time(
    store: FileStore, executor: StoreExecutor
) -> None:
    earlier, later = Pod(store, executor, "earlier"), Pod(store, executor, "later")
    earlier.deadline_in_s, later.deadline_in_s = 500.0, 40.0
    await earlier.lease.settle()
    later.on_sleep = functools.partial(earlier.lease.renew, 2)
    await later.lease.wait_for_ending()
    assert later.now_s == 20
    await earlier.lease.require_held()


async def test_without_a_name_an_answering_holder_is_another_job_and_a_silent_one_is_replaced(
    store: FileStore, executor: StoreExecutor
) -> None:
    first, second = Pod(store, executor, "first", job=None), Pod(store, executor, "second", job=None)
    await first.lease.settle()
    await second.lease.settle()
    assert second.now_s >= SILENCE_S
    third = Pod(store, executor, "third", job=None)
    third.on_sleep = functools.partial(second.lease.renew, int(ASK_POLL_S))
    with pytest.raises(ConfigurationError, match="is being written by another job"):
        await third.lease.settle()
    assert read(store).holder == "second"


async def test_old_claims_are_deleted(store: FileStore, executor: StoreExecutor) -> None:
    for epoch in range(MOST_CLAIMS):
        store.put(Claim(epoch + 1, "0" * 16).key, b"{}")
    pod = Pod(store, executor, "pod")
    await pod.lease.settle()
    left = claims_among(stored.key for stored in store.list(keys.CLAIMS))
    assert len(left) == KEPT_CLAIMS
    assert left[-1].epoch == MOST_CLAIMS + 1
    await pod.lease.require_held()


async def test_nodes_of_an_attempt_that_the_present_holder_did_not_declare_commit_nothing(
    store: FileStore, executor: StoreExecutor
) -> None:
    zero, one = (Pod(store, executor, f"earlier-{index}", node=Node(index, 2)) for index in (0, 1))
    await zero.lease.settle()
    assert await zero.lease.objection(Node(0, 2), "a") is None
    assert await one.lease.objection(Node(1, 2), "a") is None
    await one.lease.require_held(Node(1, 2), "a")
    later = Pod(store, executor, "later-0", node=Node(0, 2))
    await later.lease.settle()
    await one.lease.require_held(Node(1, 2), "a")  # nothing is declared yet
    assert await later.lease.objection(Node(0, 2), "b") is None
    with pytest.raises(Fenced, match="node 0 of attempt a does not hold the prefix"):
        await one.lease.require_held(Node(1, 2), "a")
    assert not one.lease.fenced.is_set(), "the pod may belong to the next attempt, too"
    await one.lease.require_held(Node(1, 2), "b")


async def test_a_pod_that_ends_after_it_was_fenced_leaves_the_document_of_the_later_one(
    store: FileStore, executor: StoreExecutor
) -> None:
    earlier, later = Pod(store, executor, "earlier"), Pod(store, executor, "later")
    await earlier.lease.settle()
    await later.lease.settle()
    earlier.deadline_in_s = 20.0
    await earlier.lease.release_in_time()
    assert (read(store).holder, read(store).ending) == ("later", False)
    assert earlier.lease.fenced.is_set()


async def test_a_pod_that_has_ended_gives_no_sign_of_life_any_more(store: FileStore, executor: StoreExecutor) -> None:
    pod = Pod(store, executor, "pod")
    await pod.lease.settle()
    pod.deadline_in_s = 20.0
    await pod.lease.release()
    await pod.lease.renew(2)
    assert (read(store).ending, read(store).ends_in_s) == (True, None)


async def test_a_late_write_of_an_earlier_pod_does_not_hide_what_the_holder_declared(
    store: FileStore, executor: StoreExecutor
) -> None:
    earlier, later = (Pod(store, executor, name, node=Node(0, 2)) for name in ("earlier", "later"))
    await earlier.lease.settle()
    await earlier.lease.objection(None, "a")
    late = store.get(keys.RUN)
    await later.lease.settle()
    await later.lease.objection(None, "b")
    store.put(keys.RUN, late)
    await later.lease.renew(round(CHECK_S))
    assert (read(store).holder, read(store).epoch, read(store).attempts) == ("later", 2, ("b",))


async def test_a_pod_that_is_told_to_end_does_not_fence_a_holder_that_may_be_another_job(
    store: FileStore, executor: StoreExecutor
) -> None:
    first, second = Pod(store, executor, "first", job=None), Pod(store, executor, "second", job=None)
    await first.lease.settle()
    second.deadline_in_s = 20.0
    await second.lease.settle()
    await first.lease.require_held()
    assert not second.lease.is_held
    await second.lease.renew(round(CHECK_S))
    await second.lease.release()
    assert read(store).holder == "first"


async def test_deleted_claims_fence_nobody_but_the_earlier_pod(store: FileStore, executor: StoreExecutor) -> None:
    for name in ("zero", "earlier"):
        earlier = Pod(store, executor, name)
        await earlier.lease.settle()
    store.delete([stored.key for stored in store.list(keys.CLAIMS)])
    await earlier.lease.require_held()
    later = Pod(store, executor, "later")
    await later.lease.settle()
    assert read(store).epoch == 3
    with pytest.raises(Fenced):
        await earlier.lease.require_held()
    await later.lease.renew(round(CHECK_S))
    await later.lease.require_held()


async def test_a_fenced_machine_that_starts_again_by_itself_stays_fenced_while_the_later_one_lives(
    store: FileStore, executor: StoreExecutor
) -> None:
    one, two = (Pod(store, executor, name, is_unique=False) for name in ("one", "two"))
    await one.lease.settle()
    await two.lease.settle()
    again = Pod(store, executor, "one", is_unique=False)
    again.on_sleep = functools.partial(two.lease.renew, int(ASK_POLL_S))
    with pytest.raises(Fenced):
        await again.lease.settle()
    await two.lease.require_held()


async def test_a_first_node_that_does_not_know_their_number_declares_its_attempt(
    store: FileStore, executor: StoreExecutor
) -> None:
    zero, one = Pod(store, executor, "zero"), Pod(store, executor, "one", node=Node(1, 2))
    zero.lease.begin(read(store), Holder("zero", is_unique=True, node=None, job="team/train", run_id=None))
    await zero.lease.settle()
    for attempt in ("a", "b"):
        assert await zero.lease.objection(None, attempt) is None
        assert await one.lease.objection(Node(1, 2), attempt) is None
    assert read(store).attempts == ("a", "b")
