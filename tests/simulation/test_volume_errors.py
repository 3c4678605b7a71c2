"""Each place where a sidecar calls its volume meets one error that passes: nothing is lost, and nothing waits for ever."""

from __future__ import annotations

import errno

import pytest

from tests.simulation.run import play
from tests.simulation.volume_errors import FailingCall

SEEDS = (4, 7, 15)
"""Schedules with commits, resumes and retention. A pod starts, ends and is replaced in each."""


def with_error(seed: int, which: int | None, number: int) -> tuple[FailingCall, str | None]:
    failing = FailingCall(which, number)
    with failing.active():
        _, broken, _ = play("job", seed)
    return failing, broken


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
@pytest.mark.parametrize("seed", SEEDS)
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
