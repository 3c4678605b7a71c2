"""Who may write a step that another attempt may have committed."""

from __future__ import annotations

import pytest

from sidecar.core.format import keys
from sidecar.transfer.clock import Clock
from sidecar.upload.commit.committer import Committer
from sidecar.upload.commit.overwrite_guard import VALID_S, Outdated, OverwriteGuard
from tests.store.memory import MemoryStore
from tests.upload.parts import executor


async def test_a_guard_whose_caller_has_not_read_the_commit_reads_it_before_the_first_request() -> None:
    """Early uploads asked whether the step was untouched, and their guard then looked again only after two seconds."""
    store, now_s = MemoryStore(), 0.0
    with executor(concurrency=2) as threads:
        committer = Committer(store, threads)
        early = OverwriteGuard(committer, "checkpoint-10", "", caller_reads=False, clock=Clock(monotonic=lambda: now_s))
        job = OverwriteGuard(committer, "checkpoint-10", "attempt", clock=Clock(monotonic=lambda: now_s))
        store.put(keys.commit("checkpoint-10"), b"{}")
        with pytest.raises(Outdated):
            await early.pass_through()
        await job.pass_through()
        now_s = VALID_S
        with pytest.raises(Outdated):
            await job.pass_through()
