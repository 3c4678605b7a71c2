"""Take-overs by pods without a job's name: whether the holder lives decides. On a real folder and a simulated clock."""

from __future__ import annotations

import functools

import pytest

from sidecar.core.lifecycle.fencing import Holder
from sidecar.core.lifecycle.prefix_ownership import ASK_POLL_S, CHECK_S, SILENCE_S
from sidecar.errors import ConfigurationError, Fenced
from sidecar.lifecycle.run_document import read
from sidecar.store.file.store import FileStore
from sidecar.transfer.executor import StoreExecutor
from tests.lifecycle.pods import Pod
from trainer_hook.contract import Node


async def test_without_a_name_an_answering_holder_is_another_job_and_a_silent_one_is_replaced(
    store: FileStore, executor: StoreExecutor
) -> None:
    first, second = Pod(store, executor, "first", job=None), Pod(store, executor, "second", job=None)
    await first.take_over.settle()
    await second.take_over.settle()
    assert second.now_s >= SILENCE_S
    third = Pod(store, executor, "third", job=None)
    third.on_sleep = functools.partial(second.renewal.renew, int(ASK_POLL_S))
    with pytest.raises(ConfigurationError, match="is being written by another job"):
        await third.take_over.settle()
    assert read(store).holder == "second"


async def test_a_holder_is_asked_again_where_its_answer_to_an_earlier_request_removes_this_one(
    store: FileStore, executor: StoreExecutor
) -> None:
    """It was taken for dead, and fenced, although it polled for requests all the time."""
    first, second = Pod(store, executor, "first", job=None), Pod(store, executor, "second", job=None)
    await first.take_over.settle()

    async def polls() -> None:
        if second.now_s == 1.0:
            first.lease.documents.answered()  # late
        await first.renewal.renew(round(second.now_s))

    second.on_sleep = polls
    with pytest.raises(ConfigurationError, match="is being written by another job"):
        await second.take_over.settle()
    await first.lease.require_not_fenced()


async def test_an_outage_of_the_store_is_no_silence_of_the_holder(store: FileStore, executor: StoreExecutor) -> None:
    """The first look after an outage of 8 s found no sign of life, and a live holder was fenced."""
    first, second = Pod(store, executor, "first", job=None), Pod(store, executor, "second", job=None)
    await first.take_over.settle()

    async def polls() -> None:
        if second.now_s == 1.0:
            second.now_s += 2 * SILENCE_S  # the store answers neither of them
        else:
            await first.renewal.renew(round(second.now_s))

    second.on_sleep = polls
    with pytest.raises(ConfigurationError, match="is being written by another job"):
        await second.take_over.settle()
    await first.lease.require_not_fenced()


async def test_a_pod_whose_termination_notice_is_withdrawn_takes_over_from_a_silent_holder(
    store: FileStore, executor: StoreExecutor
) -> None:
    """It had left the prefix to a holder that might be alive, and never asked again: its checkpoints waited for ever."""
    first, second = Pod(store, executor, "first", job=None), Pod(store, executor, "second", job=None)
    await first.take_over.settle()
    second.deadline.in_s = SILENCE_S + 1
    await second.take_over.settle()
    assert not second.lease.is_held

    async def withdraws() -> None:
        if second.now_s >= 5:
            second.deadline.in_s = None

    second.on_sleep = withdraws
    await second.take_over.settle_later()
    assert second.now_s >= 5 + SILENCE_S
    assert (read(store).holder, read(store).epoch) == ("second", 2)


async def test_a_lone_pod_that_is_told_to_end_writes_nothing_beside_a_holder_that_may_be_alive(
    store: FileStore, executor: StoreExecutor
) -> None:
    """It committed without a claim: a sidecar that its container restarted in the grace period, after it had been fenced."""
    first, second = Pod(store, executor, "first", job=None), Pod(store, executor, "second", job=None)
    await first.take_over.settle()
    second.deadline.in_s = SILENCE_S + 1
    await second.take_over.settle()
    assert not second.lease.is_held
    for why_not in (await second.lease.reason_not_to_upload(Node(), "a"), await second.lease.reason_not_to_commit(Node(), "a")):
        assert "the prefix is held by first" in (why_not or "")
    await second.renewal.renew(round(CHECK_S))
    await second.renewal.release()
    await first.lease.require_not_fenced()
    assert read(store).holder == "first"
    first.deadline.in_s = 5.0
    await first.renewal.renew(1)  # the holder is terminating, too
    assert await second.lease.reason_not_to_upload(Node(), "a") is None
    assert await second.lease.reason_not_to_commit(Node(), "a") is None


async def test_a_pod_with_time_enough_takes_over_from_a_silent_holder_while_it_is_terminating(
    store: FileStore, executor: StoreExecutor
) -> None:
    first, second = Pod(store, executor, "first", job=None), Pod(store, executor, "second", job=None)
    await first.take_over.settle()
    second.deadline.in_s = SILENCE_S + 3
    await second.take_over.settle()
    assert second.lease.is_held
    assert SILENCE_S <= second.now_s < SILENCE_S + 2


@pytest.mark.parametrize("left_s", [30.0, 100.0])
async def test_a_pod_that_is_drained_while_it_watches_does_not_fence_a_holder_that_is_drained_too(
    left_s: float, store: FileStore, executor: StoreExecutor
) -> None:
    """The holder answers that it is terminating: that is a sign of life, not silence."""
    first, second = Pod(store, executor, "first", job=None), Pod(store, executor, "second", job=None)
    await first.take_over.settle()

    async def drained() -> None:
        first.deadline.in_s = second.deadline.in_s = left_s
        await first.renewal.renew(2)

    second.on_sleep = drained
    with pytest.raises(Fenced):
        await second.take_over.settle()
    await first.lease.require_not_fenced()


async def test_a_lone_pod_whose_index_only_its_markers_name_claims_nothing_and_waits_for_nobody(
    store: FileStore, executor: StoreExecutor
) -> None:
    await Pod(store, executor, "earlier", job=None).take_over.settle()
    later = Pod(store, executor, "later", job=None)
    later.lease.begin(read(store), Holder("later", is_unique=True, node=None, job=None, run_id=None))
    assert await later.lease.reason_not_to_upload(Node(), "a") is None
    assert await later.lease.reason_not_to_commit(Node(), "a") is None
