"""A sidecar whose tasks are all cancelled ends, wherever they wait; the next one goes on, and no invariant is broken."""

from __future__ import annotations

import pytest

from tests.simulation.cancelling import Cancelling
from tests.simulation.run import play

SEEDS = (4, 7, 15)
INSTANTS = 20
"""Of each schedule."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_sidecar_that_is_cancelled_at_any_instant_ends_and_leaves_nothing_half_done(seed: int) -> None:
    counted = Cancelling(None)
    with counted.active():
        _, broken, _ = play("job", seed)
    assert broken is None
    harmed, cancelled = [], 0
    for instant in range(INSTANTS):
        which = counted.count * (2 * instant + 1) // (2 * INSTANTS)
        cancelling = Cancelling(which)
        with cancelling.active():
            _, broken, _ = play("job", seed)
        cancelled += cancelling.cancelled is not None
        if broken is not None or cancelling.left:
            harmed.append(f"after {which} callbacks {cancelling.cancelled}: {broken}, {cancelling.left}")
    assert not harmed, "\n".join(harmed)
    assert cancelled > INSTANTS // 2
