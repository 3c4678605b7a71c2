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


BROKEN_BEFORE = [96, 459, 514, 655, 918, 1771, 2675, 600610, 600884, 601131]


def search(seeds: str) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Look for broken invariants in a process whose sets of strings have the order that a replay gives them."""
    command = [sys.executable, "-m", "tests.simulation", "job", seeds, "--json"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=True)
    result = json.loads(done.stdout)
    return Counter(result["totals"]), [tuple(one) for one in result["broken"]]


def test_the_invariants_hold_in_some_schedules() -> None:
    totals, broken = search("0:16")
    assert not broken, found("job", broken)
    for happened in ("commits", "deleted", "durable", "unanswered", "hidden", "resume ready", "exit 0", "exit 3"):
        assert totals[happened], happened


def test_the_invariants_hold_where_they_were_broken_before() -> None:
    _, broken = search(",".join(map(str, BROKEN_BEFORE)))
    assert not broken, found("job", broken)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_invariants_hold_in_three_hundred_schedules() -> None:
    totals, broken = search("16:316")
    print(dict(totals))
    assert not broken, found("job", broken)


@pytest.mark.parametrize("seed", [4, 15])
def test_a_seed_gives_the_same_schedule_each_time(seed: int) -> None:
    stories = [play("job", seed, tell=True)[2] for _ in range(2)]
    assert stories[0]
    assert stories[0] == stories[1]
