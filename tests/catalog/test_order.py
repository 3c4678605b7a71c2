"""Which checkpoint of the catalog is the later one."""

from __future__ import annotations

import pytest

from sidecar.catalog.catalog import Catalog
from sidecar.catalog.events import Events
from sidecar.core.format.attempts import Seen
from sidecar.core.format.found_checkpoint import Finished
from trainer_hook.contract import Node


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
