"""I7 holds in every schedule, and a retention that breaks one of its rules is found out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from sidecar.core.commit import retention as rules
from sidecar.core.commit.training_line import Committed
from sidecar.retention import store_retention
from sidecar.upload.commit.committer import Committer
from tests.simulation.audit import Violation
from tests.simulation.retention import RetentionSchedule


def search(seeds: range) -> tuple[Counter[str], list[str]]:
    totals: Counter[str] = Counter()
    broken = []
    with capture_logs() as logged:
        for seed in seeds:
            try:
                totals.update(RetentionSchedule(seed).run())
            except Violation as violation:
                broken.append(f"seed {seed}: {violation}")
            logged.clear()
    return totals, broken


def test_retention_holds_in_some_schedules() -> None:
    totals, broken = search(range(60))
    assert not broken, "\n".join(broken[:10])
    assert totals["deleted"] > 60
    assert totals["attempts"] > 60


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_retention_holds_in_a_thousand_schedules() -> None:
    totals, broken = search(range(1000, 2000))
    print(dict(totals))
    assert not broken, "\n".join(broken[:10])


def by_step(commits: Any) -> list[Committed]:
    return sorted(commits, key=lambda commit: commit.step, reverse=True)


async def _finds_nothing(self: Committer, *_: Any) -> None:
    return None


async def _knows_no_quarantine(self: Committer, commit: Any, crc64nvme: str) -> str | None:
    return await _why_not_whole(self, commit, "0" * 16)


_why_not_whole = Committer.why_not_whole


def _ranks_by_step(patch: pytest.MonkeyPatch) -> None:
    for module in (store_retention, rules):
        patch.setattr(module, "present_line", by_step)


def _as_before(patch: pytest.MonkeyPatch) -> None:
    """Ranks by step alone, at once, whatever became of the commit."""
    _ranks_by_step(patch)
    patch.setattr(store_retention, "SETTLED_S", 0.0)
    patch.setattr(Committer, "why_not_whole", _finds_nothing)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "ranks by step, at once, unseen": _as_before,
    "ranks by step": _ranks_by_step,
    "does not wait for the second looks": lambda patch: patch.setattr(store_retention, "SETTLED_S", 0.0),
    "does not look at the objects": lambda patch: patch.setattr(Committer, "why_not_whole", _finds_nothing),
    "knows no quarantine of others": lambda patch: patch.setattr(Committer, "why_not_whole", _knows_no_quarantine),
    "deletes nothing": lambda patch: patch.setattr(store_retention, "is_surplus", lambda *_, **__: False),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_rule_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[mutant](monkeypatch)
    for first in range(0, 1000, 50):
        _, broken = search(range(first, first + 50))
        if broken:
            print(f"{mutant}: {len(broken)} of 50 from seed {first} on, such as {broken[0]}")
            return
    pytest.fail(f"{mutant}: not found in 1,000 schedules")
