"""A later pod writes a step anew that an earlier one has committed: its commit replaces that one, whatever the clocks say."""

from __future__ import annotations

import pytest

from sidecar.lifecycle.prefix_lease import PrefixLease
from tests.simulation.story import told

NAME = "checkpoint-10"
HOUR_S = 3600.0


def committed_attempt(skew_s: float) -> str:
    """Return the attempt whose step is committed at the end, of two that each write it from the start."""
    with told() as story:
        earlier = story.pod("a", 0.0, saves=1)
        committed_s = story.run_until_committed(NAME)
        story.world.at(committed_s + 0.1, earlier.kill)
        later = story.pod("b", committed_s + 1.0, saves=1, resumes=False, skew_s=skew_s)
        story.world.loop.run(committed_s + 60.0)
        assert later.versions
        return story.store.commits[NAME].commit.attempt.rpartition("-")[2]


@pytest.mark.parametrize("skew_s", [0.0, HOUR_S, -HOUR_S])
def test_the_later_pod_replaces_the_commit_of_its_step(skew_s: float) -> None:
    assert committed_attempt(skew_s) == "b"


def test_by_the_clocks_alone_it_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixLease, "epoch_of", lambda *_: None)
    assert (committed_attempt(HOUR_S), committed_attempt(-HOUR_S)) == ("b", "a")
