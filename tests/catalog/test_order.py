"""Which checkpoint of the catalog is the later one."""

from __future__ import annotations

import pytest

from sidecar.catalog.catalog import Catalog
from sidecar.catalog.events import Events
from sidecar.core.format.attempts import Seen
from sidecar.core.format.found_checkpoint import Finished
from sidecar.core.lifecycle.states import State
from trainer_hook.contract import Node


def step_of_attempt(step: int, *, version: str = "v") -> Finished:
    return Finished(f"checkpoint-{step}", version, step, None, "a", Node(0, 1), 1.8e9 + step, None, (), {})


@pytest.mark.parametrize(("attempt", "times"), [("a", 0), ("b", 1)])
async def test_the_trainers_state_is_read_only_to_order_attempts(attempt: str, times: int) -> None:
    """The event loop read it for each waiting checkpoint, several times a second: on a slow volume the API did not answer."""
    reads = []

    def seen() -> Seen:
        reads.append(1)
        return Seen("b")

    catalog = Catalog(Events(), seen=seen)
    older, newer = (
        catalog.finished(Finished(f"checkpoint-{step}", "v", step, None, of, Node(0, 1), 1.8e9, None, (), {}), held=True)
        for step, of in ((10, "a"), (20, attempt))
    )
    catalog.durable(older, at_s=1.8e9)
    assert catalog.is_after_newest_durable(newer)
    assert len(reads) == times


async def test_a_step_that_has_lost_its_commit_is_not_the_newest_durable_one() -> None:
    catalog = Catalog(Events())
    tracked = {step: catalog.finished(step_of_attempt(step), held=True) for step in (10, 20, 30)}
    for each in tracked.values():
        catalog.durable(each, at_s=1.8e9)
    catalog.forget("checkpoint-20")  # it has left the volume
    catalog.move(tracked[30], State.FINISHED, reason="its commit is gone")
    assert (catalog.newest_durable, catalog.newest_durable_step) == (tracked[20], 20)
    assert tracked[30].committed_at_s is None
    catalog.durable(tracked[30], at_s=1.8e9)
    assert catalog.newest_durable_step == 30


async def test_a_step_whose_commit_is_revoked_to_be_written_anew_is_not_the_newest_durable_one() -> None:
    catalog = Catalog(Events())
    for step in (10, 20):
        catalog.durable(catalog.finished(step_of_attempt(step), held=True), at_s=1.8e9)
    anew = catalog.finished(step_of_attempt(20, version="w"), held=True)
    assert catalog.newest_durable_step == 20, "the store has the earlier version"
    catalog.revoked("checkpoint-20")
    assert catalog.newest_durable_step == 10
    catalog.durable(anew, at_s=1.8e9)
    assert catalog.newest_durable_step == 20
