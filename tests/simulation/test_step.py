"""The invariants hold in every schedule of nodes that commit one step; a seed gives one schedule."""

from __future__ import annotations

import gc
import itertools

import pytest

from sidecar.upload.commit.committer import Committer
from tests.simulation.run import batch, play, quiet, search
from tests.simulation.schedule import Schedule

SCHEDULES = 5_000


def found(kind: str, broken: list[tuple[int, str]]) -> str:
    told = "".join(f"\nseed {seed}: {reason}" for seed, reason in broken[:10])
    return f"{told}\nrun `python -m tests.simulation {kind} SEED` to see what happened"


def test_the_invariants_hold_in_some_schedules() -> None:
    totals, broken = batch("step", range(-100, 0))
    assert not broken, found("step", broken)
    assert totals["commits"] > 50


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_invariants_hold_in_five_thousand_schedules() -> None:
    totals, broken = search("step", range(SCHEDULES))
    print(dict(totals))
    assert not broken, found("step", broken)
    # What the invariants tolerate, because nobody can withdraw a request that is on its way, is rare.
    assert totals["overtaken"] < 0.04 * totals["commits"]
    assert totals["commits"] > SCHEDULES / 2


def test_a_version_that_replaces_another_waits_for_its_commit() -> None:
    """Otherwise the commit names a manifest that the newer version has overwritten."""
    _, broken = batch("step", [1592])
    assert not broken, found("step", broken)


@pytest.mark.parametrize("seed", [7, 1848])
def test_a_seed_gives_the_same_schedule_each_time(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stories = []
    for leap_s in (0.0, 1.0):
        # A wall clock that stands still, then one that leaps: neither is to be seen.
        monkeypatch.setitem(Committer.__init__.__kwdefaults__, "epoch", itertools.count(1.9e9, leap_s).__next__)
        _, broken, story = play("step", seed, tell=True)
        assert broken is None
        stories.append(story)
    assert stories[0]
    assert stories[0] == stories[1]


def _collected_after(seeds: range) -> int:
    for seed in seeds:
        Schedule(seed).run()
    return gc.collect()


def test_a_schedule_leaves_nothing_to_the_garbage_collector() -> None:
    """Looking for it would take a quarter of the time; ``batch`` does without."""
    with quiet():
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            collected = [_collected_after(range(20)) for _ in range(4)]
        finally:
            if was_enabled:
                gc.enable()
    assert min(collected) < 100, "at times, another test's garbage is among it"
