"""The lease of a prefix, on a real folder and a simulated clock."""

from __future__ import annotations

import asyncio
import functools

import pytest
from structlog.testing import capture_logs

from sidecar.core.format import keys
from sidecar.core.lifecycle.fencing import (
    KEPT_CLAIMS,
    MOST_CLAIMS,
    Claim,
    Holder,
    claims_among,
)
from sidecar.core.lifecycle.prefix_ownership import ASK_POLL_S, CHECK_S
from sidecar.errors import Fenced, StoreUnavailable, Undeclared, UnreadableRun
from sidecar.lifecycle.run_document import read
from sidecar.store.file.store import FileStore
from sidecar.transfer.executor import StoreExecutor
from tests.lifecycle.pods import Pod
from trainer_hook.contract import Node


async def test_the_later_pod_holds_the_prefix_and_the_earlier_one_learns_it_before_it_writes(
    store: FileStore, executor: StoreExecutor
) -> None:
    earlier, later = Pod(store, executor, "earlier"), Pod(store, executor, "later")
    await earlier.take_over.settle()
    await earlier.lease.require_not_fenced()
    await later.take_over.settle()
    await later.lease.require_not_fenced()
    with pytest.raises(Fenced, match=r"a later pod of this job \(later\)"):
        await earlier.lease.require_not_fenced()
    assert earlier.lease.fenced.is_set()
    assert (read(store).holder, read(store).epoch) == ("later", 2)
    with pytest.raises(Fenced):
        await earlier.lease.reason_not_to_upload(Node(), "attempt")


async def test_a_restart_of_the_holder_keeps_its_epoch_and_what_it_declared(store: FileStore, executor: StoreExecutor) -> None:
    node = Node(0, 2)
    first = Pod(store, executor, "pod", node=node)
    await first.take_over.settle()
    assert await first.lease.reason_not_to_upload(node, "a") is None
    again = Pod(store, executor, "pod", node=node)
    await again.take_over.settle()
    assert (read(store).epoch, read(store).attempts) == (1, ("a",))
    await first.lease.require_not_fenced()


async def test_a_fenced_pod_stays_fenced_and_a_machine_may_come_back(store: FileStore, executor: StoreExecutor) -> None:
    await Pod(store, executor, "one").take_over.settle()
    await Pod(store, executor, "two").take_over.settle()
    with pytest.raises(Fenced):
        await Pod(store, executor, "one").take_over.settle()
    await Pod(store, executor, "one", is_unique=False).take_over.settle()
    assert (read(store).holder, read(store).epoch) == ("one", 3)


async def test_old_claims_are_deleted(store: FileStore, executor: StoreExecutor) -> None:
    for epoch in range(MOST_CLAIMS):
        store.put(Claim(epoch + 1, "0" * 16).key, b"{}")
    pod = Pod(store, executor, "pod")
    await pod.take_over.settle()
    left = claims_among((stored.key, stored.modified) for stored in store.list(keys.CLAIMS))
    assert len(left) == KEPT_CLAIMS
    assert left[-1].epoch == MOST_CLAIMS + 1
    await pod.lease.require_not_fenced()


async def test_nodes_of_an_attempt_that_the_present_holder_did_not_declare_commit_nothing(
    store: FileStore, executor: StoreExecutor
) -> None:
    zero, one = (Pod(store, executor, f"earlier-{index}", node=Node(index, 2)) for index in (0, 1))
    await zero.take_over.settle()
    assert await zero.lease.reason_not_to_upload(Node(0, 2), "a") is None
    assert await one.lease.reason_not_to_upload(Node(1, 2), "a") is None
    await one.lease.require_not_fenced(Node(1, 2), "a")
    assert await one.lease.reason_not_to_commit(Node(1, 2), "a") is None
    later = Pod(store, executor, "later-0", node=Node(0, 2))
    await later.take_over.settle()
    await one.lease.require_not_fenced(Node(1, 2), "a")  # it may send: nothing is declared yet
    assert "not declared" in (await one.lease.reason_not_to_commit(Node(1, 2), "a") or "")
    replacing = await one.lease.reason_not_to_upload(Node(1, 2), "a", until_declared=True)
    assert "not declared" in (replacing or ""), "nor replaces it a commit"
    assert await later.lease.reason_not_to_upload(Node(0, 2), "b") is None
    with pytest.raises(Fenced, match="node 0 of attempt a does not hold the prefix"):
        await one.lease.require_not_fenced(Node(1, 2), "a")
    assert not one.lease.fenced.is_set(), "the pod may belong to the next attempt, too"
    await one.lease.require_not_fenced(Node(1, 2), "b")


async def test_a_pod_that_ends_after_it_was_fenced_leaves_the_document_of_the_later_one(
    store: FileStore, executor: StoreExecutor
) -> None:
    earlier, later = Pod(store, executor, "earlier"), Pod(store, executor, "later")
    await earlier.take_over.settle()
    await later.take_over.settle()
    earlier.deadline.in_s = 20.0
    await earlier.renewal.release_within(10.0)
    assert (read(store).holder, read(store).ending) == ("later", False)
    assert earlier.lease.fenced.is_set()


async def test_a_pod_that_has_ended_gives_no_sign_of_life_any_more(store: FileStore, executor: StoreExecutor) -> None:
    pod = Pod(store, executor, "pod")
    await pod.take_over.settle()
    pod.deadline.in_s = 20.0
    await pod.renewal.release()
    await pod.renewal.renew(2)
    assert (read(store).ending, read(store).ends_in_s) == (True, None)


async def test_a_late_write_of_an_earlier_pod_does_not_hide_what_the_holder_declared(
    store: FileStore, executor: StoreExecutor
) -> None:
    earlier, later = (Pod(store, executor, name, node=Node(0, 2)) for name in ("earlier", "later"))
    await earlier.take_over.settle()
    await earlier.lease.reason_not_to_upload(None, "a")
    late = store.get(keys.RUN)
    await later.take_over.settle()
    await later.lease.reason_not_to_upload(None, "b")
    store.put(keys.RUN, late)
    await later.renewal.renew(round(CHECK_S))
    assert (read(store).holder, read(store).epoch, read(store).attempts) == ("later", 2, ("b",))


async def test_deleted_claims_fence_nobody_but_the_earlier_pod(store: FileStore, executor: StoreExecutor) -> None:
    for name in ("zero", "earlier"):
        earlier = Pod(store, executor, name)
        await earlier.take_over.settle()
    store.delete([stored.key for stored in store.list(keys.CLAIMS)])
    await earlier.lease.require_not_fenced()
    later = Pod(store, executor, "later")
    await later.take_over.settle()
    assert read(store).epoch == 3
    with pytest.raises(Fenced):
        await earlier.lease.require_not_fenced()
    await later.renewal.renew(round(CHECK_S))
    await later.lease.require_not_fenced()


async def test_a_fenced_machine_that_starts_again_by_itself_stays_fenced_while_the_later_one_lives(
    store: FileStore, executor: StoreExecutor
) -> None:
    one, two = (Pod(store, executor, name, is_unique=False) for name in ("one", "two"))
    await one.take_over.settle()
    await two.take_over.settle()
    again = Pod(store, executor, "one", is_unique=False)
    again.on_sleep = functools.partial(two.renewal.renew, int(ASK_POLL_S))
    with pytest.raises(Fenced):
        await again.take_over.settle()
    await two.lease.require_not_fenced()


async def test_a_first_node_that_does_not_know_their_number_declares_its_attempt(
    store: FileStore, executor: StoreExecutor
) -> None:
    zero, one = Pod(store, executor, "zero"), Pod(store, executor, "one", node=Node(1, 2))
    zero.lease.begin(read(store), Holder("zero", is_unique=True, node=None, job="team/train", run_id=None))
    await zero.take_over.settle()
    for attempt in ("a", "b"):
        assert await zero.lease.reason_not_to_upload(None, attempt) is None
        assert await one.lease.reason_not_to_upload(Node(1, 2), attempt) is None
    assert read(store).attempts == ("a", "b")


async def test_a_node_commits_nothing_between_the_claim_of_a_later_pod_and_its_document(
    store: FileStore, executor: StoreExecutor
) -> None:
    zero, one = (Pod(store, executor, f"earlier-{index}", node=Node(index, 2)) for index in (0, 1))
    await zero.take_over.settle()
    await zero.lease.reason_not_to_upload(Node(0, 2), "a")
    assert await one.lease.reason_not_to_commit(Node(1, 2), "a") is None
    before = store.get(keys.RUN)
    later = Pod(store, executor, "later-0", node=Node(0, 2))
    await later.take_over.settle()
    store.put(keys.RUN, before)  # as before its first write, or after a late one of the earlier pod
    assert "is taking the prefix over" in (await one.lease.reason_not_to_commit(Node(1, 2), "a") or "")
    await later.lease.reason_not_to_upload(Node(0, 2), "b")
    assert await one.lease.reason_not_to_commit(Node(1, 2), "b") is None
    assert one.lease.epoch_of("b") == later.lease.epoch_of("b") == 2


@pytest.mark.parametrize("job", ["team/train", None])
async def test_a_node_waits_where_a_late_write_hides_its_attempt(
    store: FileStore, executor: StoreExecutor, job: str | None
) -> None:
    """It gave its checkpoints up for good, and node 0, which had declared the attempt, waited for it without end."""
    zero, one = (Pod(store, executor, f"pod-{index}", node=Node(index, 2), job=job) for index in (0, 1))
    await zero.take_over.settle()
    undeclared = store.get(keys.RUN)
    for attempt in ("a", "b"):
        before = store.get(keys.RUN)
        assert await zero.lease.reason_not_to_upload(Node(0, 2), attempt) is None
        assert await one.lease.reason_not_to_upload(Node(1, 2), attempt) is None
    for late, reason in ((undeclared, "not declared attempt b"), (before, "late write")):
        store.put(keys.RUN, late)
        assert reason in (await one.lease.reason_not_to_commit(Node(1, 2), "b") or "")
        if job is None or late == before:
            with pytest.raises(Undeclared, match=reason):
                await one.lease.require_not_fenced(Node(1, 2), "b")
    await zero.renewal.renew(round(CHECK_S))
    assert await one.lease.reason_not_to_commit(Node(1, 2), "b") is None
    await one.lease.require_not_fenced(Node(1, 2), "b")


async def test_a_node_that_never_saw_its_attempt_declared_waits_after_a_late_write_of_an_earlier_pod(
    store: FileStore, executor: StoreExecutor
) -> None:
    """It sent while nothing was declared. The late document looked like a take-over: it gave its checkpoint up for good."""
    earlier, later = (Pod(store, executor, name, node=Node(0, 2)) for name in ("earlier-0", "later-0"))
    one = Pod(store, executor, "later-1", node=Node(1, 2))
    await earlier.take_over.settle()
    await earlier.lease.reason_not_to_upload(Node(0, 2), "a")
    late = store.get(keys.RUN)
    await later.take_over.settle()
    assert await one.lease.reason_not_to_upload(Node(1, 2), "b") is None
    store.put(keys.RUN, late)
    with pytest.raises(Undeclared, match="not declared attempt b"):
        await one.lease.require_not_fenced(Node(1, 2), "b")
    await later.lease.reason_not_to_upload(Node(0, 2), "b")
    await one.lease.require_not_fenced(Node(1, 2), "b")


@pytest.mark.parametrize("has_learned", [True, False])
async def test_a_node_whose_attempt_was_declared_gives_up_after_a_take_over_before_it_sends_anything(
    store: FileStore, executor: StoreExecutor, has_learned: bool
) -> None:
    """It had asked for no checkpoint of its attempt before, and waited for the declaration for ever."""
    zero, one = (Pod(store, executor, f"earlier-{index}", node=Node(index, 2)) for index in (0, 1))
    await zero.take_over.settle()
    await zero.lease.reason_not_to_upload(None, "a")
    if has_learned:
        one.present_attempt = lambda: "a"  # type: ignore[method-assign]
        one.on_sleep = asyncio.Event().wait  # type: ignore[assignment]
        learning = asyncio.create_task(one.renewal.learn_epochs())
        while "a" not in one.lease.attempts.epochs:
            await asyncio.sleep(0.01)
        learning.cancel()
    later = Pod(store, executor, "later-0", node=Node(0, 2))
    await later.take_over.settle()
    assert await one.lease.reason_not_to_upload(Node(1, 2), "a") is None, "undeclared: it sends, and does not commit"
    await later.lease.reason_not_to_upload(None, "b")
    if has_learned:
        with pytest.raises(Fenced, match="node 0 of attempt a does not hold the prefix"):
            await one.lease.reason_not_to_upload(Node(1, 2), "a")
    else:
        assert "does not hold the prefix" in (await one.lease.reason_not_to_upload(Node(1, 2), "a") or "")
    assert await one.lease.reason_not_to_upload(Node(1, 2), "b") is None


async def test_a_node_gives_up_an_attempt_that_was_never_declared_once_its_trainer_is_in_a_later_one(
    store: FileStore, executor: StoreExecutor
) -> None:
    """Node 0 was lost before it declared the attempt; the parts of the other nodes waited for it until the pods ended."""
    lost, present = "20260101T000001Z-aaaaaa", "20260101T000002Z-bbbbbb"
    zero, one = (Pod(store, executor, f"later-{index}", node=Node(index, 2)) for index in (0, 1))
    await zero.take_over.settle()
    await zero.lease.reason_not_to_upload(None, present)
    assert "does not hold the prefix" in (await one.lease.reason_not_to_upload(Node(1, 2), lost) or "")
    assert await one.lease.reason_not_to_upload(Node(1, 2), present) is None
    with pytest.raises(Fenced, match=f"left it for {present}"):
        await one.lease.reason_not_to_upload(Node(1, 2), lost)


async def test_a_damaged_document_is_waited_for_by_other_nodes_and_written_again_by_the_holder(
    store: FileStore, executor: StoreExecutor
) -> None:
    zero, one = (Pod(store, executor, f"pod-{index}", node=Node(index, 2)) for index in (0, 1))
    await zero.take_over.settle()
    await zero.lease.reason_not_to_upload(Node(0, 2), "a")
    store.put(keys.RUN, b"[]")
    with pytest.raises(UnreadableRun, match=r"run\.json is not this system's: .* delete it, and it is written again"):
        await one.lease.reason_not_to_upload(Node(1, 2), "a")
    assert "run.json is not this system's" in (await one.lease.reason_not_to_commit(Node(1, 2), "a") or "")
    await zero.renewal.renew(round(CHECK_S))
    assert (read(store).holder, read(store).epoch, read(store).attempts) == ("pod-0", 1, ("a",))
    assert await one.lease.reason_not_to_upload(Node(1, 2), "a") is None
    assert await one.lease.reason_not_to_commit(Node(1, 2), "a") is None


async def test_a_pod_that_has_said_that_it_has_ended_commits_nothing(store: FileStore, executor: StoreExecutor) -> None:
    pod = Pod(store, executor, "pod")
    await pod.take_over.settle()
    pod.deadline.in_s = 20.0
    await pod.renewal.release()
    with pytest.raises(Fenced, match="this pod has ended"):
        await pod.lease.require_not_fenced()


async def test_a_store_that_is_away_does_not_end_the_wait_of_other_nodes(store: FileStore, executor: StoreExecutor) -> None:
    one = Pod(store, executor, "one", node=Node(1, 2))

    class Away:
        def __getattr__(self, name: str) -> object:
            def call(*args: object, **kwargs: object) -> object:
                raise StoreUnavailable("away")

            return call

    one.lease.documents._store = Away()  # type: ignore[assignment]
    with pytest.raises(StoreUnavailable):
        await one.lease.reason_not_to_upload(Node(1, 2), "a")


async def test_a_long_outage_does_not_fill_the_log(
    store: FileStore, executor: StoreExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = Pod(store, executor, "pod")
    await pod.take_over.settle()

    async def fail(tick: int) -> None:
        if tick > 3600:
            raise asyncio.CancelledError
        raise StoreUnavailable("away")

    monkeypatch.setattr("sidecar.lifecycle.renewal.TICK_S", 0.0)
    monkeypatch.setattr(pod.renewal, "renew", fail)
    with capture_logs() as logged, pytest.raises(asyncio.CancelledError):
        await pod.renewal.keep()
    said = [event for event in logged if event["event"] == "no_heartbeat"]
    assert 1 < len(said) < 20
    assert said[0]["failures"] == 1
