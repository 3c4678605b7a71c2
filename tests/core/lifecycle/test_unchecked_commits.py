from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.lifecycle.unchecked_commits import MOST, UNCHECKED_S, unchecked_commits
from sidecar.upload.commit.post_commit_check import LATE_S, POLL_S
from trainer_hook.contract import rfc3339

names = st.integers(0, 10**6).map(lambda step: f"checkpoint-{step}")
ages = st.dictionaries(names, st.integers(0, 10**6), max_size=12)
"""Seconds before some instant."""
NOW_S = 1_900_000_000


def listed(age_s: float) -> str:
    return rfc3339(NOW_S - age_s)


@given(ages)
def test_the_latest_commit_is_checked_and_none_that_its_own_pod_had_the_time_to_check(ages_s: dict[str, int]) -> None:
    found = unchecked_commits({name: listed(age_s) for name, age_s in ages_s.items()})
    latest_s = min(ages_s.values(), default=0)
    assert len(found) <= MOST
    assert bool(found) is bool(ages_s)
    assert not found or ages_s[found[0]] == latest_s
    assert [ages_s[name] for name in found] == sorted(ages_s[name] for name in found)
    assert all(ages_s[name] - latest_s <= UNCHECKED_S for name in found)
    recent = [name for name, age_s in ages_s.items() if age_s - latest_s <= UNCHECKED_S]
    assert len(found) == min(MOST, len(recent))


def test_all_checks_of_a_commit_are_due_within_the_time_that_is_looked_back() -> None:
    assert LATE_S[-1][0] + POLL_S < UNCHECKED_S


def test_a_commit_of_unknown_time_is_not_checked() -> None:
    assert unchecked_commits({"checkpoint-10": "", "checkpoint-20": listed(5), "final": f"{(NOW_S - 7) * 10**9:020}"}) == [
        "checkpoint-20",
        "final",
    ]
