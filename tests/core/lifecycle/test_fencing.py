"""The order of claims, and who waits for whom."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.format import keys
from sidecar.core.lifecycle.fencing import (
    ENDING_SILENCE_S,
    KEPT_CLAIMS,
    MOST_CLAIMS,
    Claim,
    Standing,
    claims_among,
    next_claim,
    obsolete,
    standing,
    waits_for_ending,
)
from sidecar.core.lifecycle.prefix_ownership import Run

ids = st.sampled_from([f"{number:016x}" for number in range(4)])
claims = st.lists(st.builds(Claim, st.integers(1, 5), ids), max_size=8, unique=True)


@given(claims, st.lists(st.text(max_size=30)))
def test_a_claim_is_found_again_by_its_key_and_nothing_else_is_one(there: list[Claim], others: list[str]) -> None:
    found = claims_among([claim.key for claim in there] + [f"{keys.CLAIMS}{other}" for other in others] + [keys.RUN])
    assert set(there) <= set(found)
    assert {claim.key for claim in found} <= {c.key for c in there} | {f"{keys.CLAIMS}{other}" for other in others}


@given(claims, ids)
def test_at_most_one_pod_holds_the_prefix_and_every_other_with_a_claim_is_fenced(there: list[Claim], me: str) -> None:
    standings = {each: standing(there, each) for each in {claim.holder_id for claim in there}}
    assert list(standings.values()).count(Standing.HOLDER) == (1 if there else 0)
    assert Standing.NEW not in standings.values()
    assert me in standings or standing(there, me) is Standing.NEW


@given(claims, ids)
def test_who_takes_over_is_the_holder_and_the_one_before_is_fenced_for_good(there: list[Claim], me: str) -> None:
    before = [claim.holder_id for claim in there if standing(there, claim.holder_id) is Standing.HOLDER]
    after = [*there, next_claim(there, me)]
    assert standing(after, me) is Standing.HOLDER
    assert all(standing(after, each) is Standing.FENCED for each in before if each != me)


@given(st.permutations(range(6)))
def test_of_two_that_take_over_at_once_exactly_one_believes_it_in_the_end(order: list[int]) -> None:
    """Each of two pods lists, writes and lists again, in any interleaving; afterwards both ask once more."""
    store: set[str] = {Claim(3, "0" * 16).key}
    steps = {me: itertools.count() for me in ("a" * 16, "b" * 16)}
    listed: dict[str, list[Claim]] = {}
    for number in order:
        me = ("a" * 16, "b" * 16)[number % 2]
        match next(steps[me]):
            case 0:
                listed[me] = claims_among(store)
            case 1:
                store.add(next_claim(listed[me], me).key)
            case 2:
                listed[me] = claims_among(store)
    assert [standing(claims_among(store), me) for me in steps].count(Standing.HOLDER) == 1
    believing = [me for me in steps if standing(listed[me], me) is Standing.HOLDER]
    assert believing, "one of them goes on at once"


@given(st.integers(0, 3 * MOST_CLAIMS))
def test_the_latest_claims_are_kept(count: int) -> None:
    there = [Claim(epoch + 1, "0" * 16) for epoch in range(count)]
    gone = obsolete(there)
    assert gone == there[: len(gone)]
    assert len(there) - len(gone) == (KEPT_CLAIMS if count > MOST_CLAIMS else count)


runs = st.builds(
    Run,
    st.just("r"),
    holder=st.sampled_from([None, "me", "other"]),
    ending=st.booleans(),
    ends_in_s=st.none() | st.floats(0, 600),
)


@given(runs, runs, st.floats(0, 10_000), st.floats(0, 100))
def test_nobody_waits_for_himself_or_for_a_pod_that_stays_or_longer_than_its_deadline(
    first: Run, now: Run, watched_s: float, silent_s: float
) -> None:
    waits = waits_for_ending(first, now, me="me", watched_s=watched_s, silent_s=silent_s)
    if waits:
        assert now.ending
        assert now.holder == "other"
        assert silent_s < ENDING_SILENCE_S
        assert watched_s < 600
    assert not waits_for_ending(first, replace(now, ends_in_s=None), me="me", watched_s=0, silent_s=0), "it was released"


def test_a_pod_that_flushes_is_waited_for_until_its_own_deadline() -> None:
    first = Run("r", holder="other", ending=True, ends_in_s=50)
    assert waits_for_ending(first, replace(first, beat=9, ends_in_s=30), me="me", watched_s=20, silent_s=1)
    assert not waits_for_ending(first, replace(first, beat=25, ends_in_s=0.5), me="me", watched_s=50, silent_s=1)
    assert not waits_for_ending(first, first, me="me", watched_s=20, silent_s=ENDING_SILENCE_S), "it died without a word"
