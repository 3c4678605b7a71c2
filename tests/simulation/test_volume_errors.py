"""Each place where a sidecar calls its volume meets one error that passes: nothing is lost, and nothing waits for ever."""

from __future__ import annotations

import errno

import pytest

from tests.simulation.run import play
from tests.simulation.volume_errors import FailingCall

SCHEDULES = ((4, errno.EIO), (7, errno.ESTALE), (15, errno.EIO))
"""Seeds of schedules with commits, resumes and retention, in each of which a pod is replaced; and the error."""


def with_error(seed: int, which: int | None, number: int) -> tuple[FailingCall, str | None]:
    failing = FailingCall(which, number)
    with failing.active():
        _, broken, _ = play("job", seed)
    return failing, broken


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("seed", "number"), SCHEDULES)
def test_an_error_of_one_call_to_the_volume_costs_nothing(seed: int, number: int) -> None:
    counted, broken = with_error(seed, None, number)
    assert broken is None
    assert len(counted.places) > 50
    harmed = []
    for calls in counted.places.values():
        failing, broken = with_error(seed, calls[len(calls) // 2], number)
        assert failing.failed is not None
        if broken is not None:
            harmed.append(f"{failing.failed}: {broken[:500]}")
    assert not harmed, "\n".join(harmed)
