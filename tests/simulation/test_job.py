"""The invariants hold in every schedule of whole pods."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.simulation.run import play
from tests.simulation.test_step import found

ROOT = Path(__file__).parents[2]


def search(seeds: range) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Look for broken invariants in a process whose sets of strings have the order that a replay gives them."""
    command = [sys.executable, "-m", "tests.simulation", "job", f"{seeds.start}:{seeds.stop}", "--json"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=True)
    result = json.loads(done.stdout)
    return Counter(result["totals"]), [tuple(one) for one in result["broken"]]


KNOWN = {96}
"""Seeds of an open defect: the request with which one node commits arrives after another node of the same attempt has begun to
write the step again and has revoked the commit. The check after the commit mends it; until then the commit names objects of two
writings."""


@pytest.mark.timeout(300)
def test_the_invariants_hold_in_some_schedules() -> None:
    totals, broken = search(range(100))
    broken = [one for one in broken if one[0] not in KNOWN]
    assert not broken, found("job", broken)
    for happened in ("commits", "deleted", "durable", "unanswered", "hidden", "resume ready", "exit 0", "exit 3"):
        assert totals[happened], happened


@pytest.mark.xfail(strict=True, reason="open defect: a late commit of a writing that is being replaced")
@pytest.mark.parametrize("seed", sorted(KNOWN))
def test_a_late_commit_of_an_earlier_writing_of_the_attempt_names_no_later_objects(seed: int) -> None:
    _, broken = search(range(seed, seed + 1))
    assert not broken, found("job", broken)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_invariants_hold_in_a_thousand_schedules() -> None:
    totals, broken = search(range(1000, 2000))
    print(dict(totals))
    assert not broken, found("job", broken)


@pytest.mark.parametrize("seed", [4, 15])
def test_a_seed_gives_the_same_schedule_each_time(seed: int) -> None:
    stories = [play("job", seed, tell=True)[2] for _ in range(2)]
    assert stories[0]
    assert stories[0] == stories[1]
