"""An answer of the store that was damaged in transit ends neither a start nor a training."""

from __future__ import annotations

import dataclasses

import pytest

from sidecar.core.format import keys
from sidecar.core.lifecycle.fencing import (
    Claim,
)
from sidecar.core.lifecycle.prefix_ownership import CHECK_S
from sidecar.errors import Fenced, UnreadableRun
from sidecar.lifecycle.run_document import UNREADABLE_TRIES, read
from sidecar.store.file.store import FileStore
from sidecar.transfer.executor import StoreExecutor
from tests.lifecycle.pods import Pod


async def test_a_claim_that_only_one_listing_has_fences_nobody(
    store: FileStore, executor: StoreExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flipped bit of the store's answer made this pod's claim that of another one, and ended the training."""
    pod = Pod(store, executor, "pod")
    await pod.take_over.settle()
    damaged = [[Claim(3, "0" * 16)], [Claim(7, "0" * 16)]]
    real = pod.lease.documents.claims
    monkeypatch.setattr(pod.lease.documents, "claims", lambda: damaged.pop() if damaged else real())
    await pod.lease.require_not_fenced()
    assert not damaged
    await pod.lease.require_not_fenced()
    store.put(Claim(9, "0" * 16).key, b"{}")
    with pytest.raises(Fenced):
        await pod.lease.require_not_fenced()


async def test_an_epoch_that_only_one_answer_has_fences_nobody(
    store: FileStore, executor: StoreExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = Pod(store, executor, "pod")
    await pod.take_over.settle()
    read_run, damaged = pod.lease.read_run, [dataclasses.replace(read(store), epoch=3)]
    monkeypatch.setattr(pod.lease, "read_run", lambda: damaged.pop() if damaged else read_run())
    await pod.renewal.renew(CHECK_S)
    assert not damaged
    assert not pod.lease.fenced.is_set()


@pytest.mark.parametrize("is_repaired", [True, False])
async def test_a_document_that_is_damaged_for_a_moment_does_not_end_the_start(
    store: FileStore, executor: StoreExecutor, is_repaired: bool
) -> None:
    """A flipped bit of one answer ended the sidecar with exit code 2."""
    earlier, later = Pod(store, executor, "earlier"), Pod(store, executor, "later")
    await earlier.take_over.settle()
    before = store.get(keys.RUN)
    store.put(keys.RUN, before[:-9])

    async def repairs() -> None:
        if is_repaired:
            store.put(keys.RUN, before)

    later.on_sleep = repairs
    if is_repaired:
        await later.take_over.settle()
        assert read(store).holder == "later"
    else:
        with pytest.raises(UnreadableRun, match=r"run\.json is not this system's"):
            await later.take_over.settle()
        assert later.now_s == UNREADABLE_TRIES - 1
