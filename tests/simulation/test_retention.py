"""I7 holds in every schedule of the retention of many nodes."""

from __future__ import annotations

import pytest

from tests.simulation.run import batch
from tests.simulation.test_step import found


def test_retention_holds_in_some_schedules() -> None:
    totals, broken = batch("retention", range(60))
    assert not broken, found("retention", broken)
    assert totals["deleted"] > 60
    assert totals["attempts"] > 60


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_retention_holds_in_a_thousand_schedules() -> None:
    totals, broken = batch("retention", range(1000, 2000))
    print(dict(totals))
    assert not broken, found("retention", broken)
