"""The order of claims, and who waits for whom."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.format import keys
from sidecar.core.lifecycle.fencing import (
    ENDING_SILENCE_S,
    KEPT_CLAIMS,
    MOST_CLAIMS,
    MOST_EPOCH,
    START_TOLERANCE_S,
    TURNS,
    TURNS_WITHIN_S,
    Arrival,
    Claim,
    Claimed,
    ClaimState,
    Holder,
    Tie,
    after_tie,
    claim_state,
    claims_among,
    decode_claim,
    ending_silence_s,
    fencing_claim,
    has_ended,
    in_order,
    next_claim,
    obsolete,
    rivals,
    seconds_of,
    started_later,
    takeovers_in_turns,
    waits_for_ending,
)
from sidecar.core.lifecycle.prefix_ownership import Run

ids = st.sampled_from([f"{number:016x}" for number in range(4)])
times = st.sampled_from(["", *(f"2026-11-23T08:00:0{second}Z" for second in range(4))])
claims = st.lists(st.builds(Claim, st.integers(1, 5), ids, times), max_size=8, unique=True)


@given(claims, st.lists(st.text(max_size=30)))
def test_a_claim_is_found_again_by_its_key_and_nothing_else_is_one(there: list[Claim], others: list[str]) -> None:
    keys_there = (
        [claim.key for claim in there] + [f"{keys.CLAIMS}{other}" for other in others] + [keys.RUN, keys.arrival("0" * 16)]
    )
    found = claims_among((key, "") for key in keys_there)
    assert set(there) <= set(found)
    assert {claim.key for claim in found} <= {c.key for c in there} | {f"{keys.CLAIMS}{other}" for other in others}


@given(claims, ids)
def test_at_most_one_pod_holds_the_prefix_and_no_other_with_a_claim_is_new(there: list[Claim], me: str) -> None:
    states = {each: claim_state(there, each) for each in {claim.holder_id for claim in there}}
    assert list(states.values()).count(ClaimState.HOLDER) == (1 if there else 0)
    assert ClaimState.NEW not in states.values()
    assert me in states or claim_state(there, me) is ClaimState.NEW


@given(claims, ids)
def test_who_takes_over_is_the_holder_and_the_one_before_is_fenced_for_good(there: list[Claim], me: str) -> None:
    before = [claim.holder_id for claim in there if claim_state(there, claim.holder_id) is ClaimState.HOLDER]
    after = [*there, next_claim(there, me)]
    assert claim_state(after, me) is ClaimState.HOLDER
    assert all(claim_state(after, each) is ClaimState.FENCED for each in before if each != me)


@given(claims, ids)
def test_a_pod_is_tied_where_its_highest_claim_has_the_highest_epoch_and_another_one_precedes_it(
    there: list[Claim], me: str
) -> None:
    highest = max((claim.epoch for claim in there), default=0)
    own = Claim(highest, me)
    is_tied = own in there and claim_state(there, me) is not ClaimState.HOLDER
    assert (claim_state(there, me) is ClaimState.TIED) is is_tied
    assert {rival.epoch for rival in rivals(there, own)} <= {highest}
    assert me not in {rival.holder_id for rival in rivals(there, own)}
    assert not is_tied or in_order(there)[-1] in rivals(there, own)


class AtOnce:
    """Pods of one run that take a prefix over at once: each lists, claims and lists again (``TakeOver.claim``)."""

    def __init__(self, starts: list[float]) -> None:
        self._starts = starts
        self._ids = [f"{number:016x}" for number in range(len(starts))]
        self._times = itertools.count()
        self.store: list[Claim] = []
        self.own: dict[int, Claim] = {}
        """The last claim of each pod."""
        self.ended: dict[int, bool] = {}
        """Whether each pod that is through believes that it holds the prefix."""

    def acts(self, order: list[int]) -> None:
        """Let the pods act, one step of ``order`` after the other, and then all to their end."""
        acting = [self._claims(pod) for pod in range(len(self._starts))]
        for pod in [*order, *(pod for pod in range(len(acting)) for _ in range(100))]:
            next(acting[pod], None)

    def holds(self, pod: int) -> bool:
        """Whether the claim of a pod is the highest."""
        return claim_state(self.store, self._ids[pod]) is ClaimState.HOLDER

    def _is_earlier(self, pod: int, than: Claim) -> bool:
        return self._starts[self._ids.index(than.holder_id)] > self._starts[pod] + START_TOLERANCE_S

    def _claims(self, pod: int) -> Iterator[None]:
        me, claims_again = self._ids[pod], False
        self.ended[pod] = False
        while True:
            seen = in_order(self.store)
            yield
            if (claim_state(seen, me) is ClaimState.FENCED and not claims_again) or (seen and self._is_earlier(pod, seen[-1])):
                return
            own = self.own[pod] = replace(next_claim(seen, me), modified=f"{next(self._times):06}")
            self.store.append(own)
            yield
            seen = in_order(self.store)
            yield
            tie = None
            if claim_state(seen, me) is ClaimState.HOLDER:
                self.ended[pod] = not any(self._is_earlier(pod, rival) for rival in rivals(seen, own))
                tie = None if self.ended[pod] else Tie.GIVE_WAY
            elif seen[-1].epoch == own.epoch:
                tie = after_tie(is_same_run=True, is_earlier=self._is_earlier(pod, seen[-1]))
            if tie is Tie.GIVE_WAY:
                self.store.remove(own)
            if tie is not Tie.CLAIM_AGAIN:
                return
            claims_again = True


steps_of_two = st.lists(st.integers(0, 1), max_size=14)


@given(steps_of_two, st.booleans())
def test_of_two_pods_that_claim_at_once_the_one_that_started_later_holds_the_prefix(order: list[int], is_first: bool) -> None:
    """The one whose claim was written first held it, and its replacement was fenced for good."""
    pods = AtOnce([2 * START_TOLERANCE_S, 0.0] if is_first else [0.0, 2 * START_TOLERANCE_S])
    pods.acts(order)
    later, earlier = (0, 1) if is_first else (1, 0)
    assert pods.ended[later]
    assert pods.holds(later)
    assert not pods.ended[earlier] or fencing_claim(pods.store, pods.own[earlier]) is not None


@given(st.lists(st.integers(0, 3), min_size=2, max_size=4), st.lists(st.integers(0, 3), max_size=24))
def test_of_many_pods_that_claim_at_once_one_believes_that_it_holds_the_prefix_and_does(
    starts: list[int], order: list[int]
) -> None:
    pods = AtOnce([20.0 * start for start in starts])
    pods.acts([pod for pod in order if pod < len(starts)])
    assert [pods.ended[pod] for pod in range(len(starts)) if pods.holds(pod)] == [True]


@given(st.booleans())
def test_a_pod_of_an_unknown_run_fences_nobody_that_claimed_at_the_same_time(is_earlier: bool) -> None:
    assert after_tie(is_same_run=False, is_earlier=is_earlier) is Tie.TWO_AT_ONCE


@given(st.permutations(range(6)))
def test_of_two_that_take_over_at_once_exactly_one_holds_the_prefix(order: list[int]) -> None:
    """Each of two pods lists, writes and lists again, in any interleaving."""
    store = [Claim(3, "0" * 16, "0000")]
    steps = {me: itertools.count() for me in ("a" * 16, "b" * 16)}
    listed: dict[str, list[Claim]] = {}
    for at, number in enumerate(order, 1):
        me = ("a" * 16, "b" * 16)[number % 2]
        match next(steps[me]):
            case 1:
                store.append(replace(next_claim(listed[me], me), modified=f"{at:04}"))
            case _:
                listed[me] = in_order(store)
    assert [claim_state(store, me) for me in steps].count(ClaimState.HOLDER) == 1
    believing = [me for me in steps if claim_state(listed[me], me) is ClaimState.HOLDER]
    assert believing, "one of them goes on at once"
    assert claim_state(store, believing[-1]) is ClaimState.HOLDER or len(believing) == 2


@given(claims, ids)
def test_a_claim_that_arrives_late_does_not_fence_the_pod_that_took_its_epoch_meanwhile(there: list[Claim], me: str) -> None:
    """A pod was cut off between its look at the claims and its own claim."""
    seen = [replace(claim, modified="2026-11-23T08:00:00Z") for claim in there if claim.holder_id != me]
    other = next_claim(seen, "f" * 16 if me < "8" else "0" * 16)
    taken, late = (
        replace(other, modified="2026-11-23T08:01:00Z"),
        replace(next_claim(seen, me), modified="2026-11-23T09:00:00Z"),
    )
    assert claim_state([*seen, taken, late], other.holder_id) is ClaimState.HOLDER
    assert fencing_claim([*seen, taken, late], taken) is None
    assert fencing_claim([*seen, taken, late], late) == taken


def test_a_pod_whose_claim_was_deleted_is_fenced_by_higher_claims_alone() -> None:
    own = Claim(3, "5" * 16)
    assert fencing_claim([], own) is None
    assert fencing_claim([Claim(2, "9" * 16)], own) is None
    assert fencing_claim([Claim(4, "1" * 16)], own) == Claim(4, "1" * 16)


@given(st.text(max_size=40) | st.binary(max_size=40).map(repr))
def test_any_time_of_a_listing_is_a_number_or_unknown(text: str) -> None:
    assert seconds_of(text) is None or isinstance(seconds_of(text), float)


def test_times_of_listings_of_s3_and_of_folders_are_the_same_instant() -> None:
    assert seconds_of("2026-11-23T08:00:00.000Z") == seconds_of(f"{1795420800 * 10**9:020}") == 1795420800
    assert seconds_of("") is None
    assert seconds_of("2026-11-23T08:00:00") is None, "a time without a zone is no time"


@given(
    st.binary(max_size=60) | st.builds(lambda age: json.dumps({"age_s": age}).encode(), st.floats() | st.text() | st.booleans())
)
def test_any_bytes_of_a_claim_give_an_age_or_none(raw: bytes) -> None:
    age_s = decode_claim(raw).age_s
    assert age_s is None or 0 <= age_s < float("inf")


def test_an_age_beyond_a_float_is_unknown_and_the_holder_is_known_all_the_same() -> None:
    claimed = decode_claim(json.dumps({"holder": "pod-1", "age_s": 10**400}).encode())
    assert (claimed.holder, claimed.age_s) == ("pod-1", None)
    claimed = decode_claim(b'{"holder": 3, "age_s": 2.5}')
    assert (claimed.holder, claimed.age_s) == (None, 2.5)


def at(epoch_s: float) -> str:
    return f"{round(epoch_s * 1e9):020}"


@given(
    earlier_began_s=st.floats(0, 1e6),
    later_after_s=st.floats(START_TOLERANCE_S + 5, 1e6),
    waits_s=st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)),
    request_s=st.tuples(st.floats(0, 4), st.floats(0, 4)),
    later_claims_first=st.booleans(),
)
def test_the_pod_that_started_later_is_known_whichever_claims_first(
    earlier_began_s: float,
    later_after_s: float,
    waits_s: tuple[float, float],
    request_s: tuple[float, float],
    later_claims_first: bool,
) -> None:
    """Two pods, each cut off from its start to its first request, for any time; their own clocks play no part."""
    began_s = (earlier_began_s, earlier_began_s + later_after_s)
    first = 1 if later_claims_first else 0
    claimed_s = began_s[first] + waits_s[first]
    there = Claim(1, "0" * 16, at(claimed_s + request_s[0]))
    arrives_s = max(claimed_s + 5, began_s[1 - first] + waits_s[1 - first])
    arrival = Arrival(arrives_s + request_s[1] - (arrives_s - began_s[1 - first]), arrives_s + request_s[1])
    assert started_later(there, Claimed("pod", claimed_s - began_s[first]), arrival) is later_claims_first


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(-1e6, 1e6))
def test_a_pod_that_is_terminating_takes_over_only_from_one_that_is_known_to_be_earlier(
    began_s: float, waited_s: float, later_s: float
) -> None:
    arrival = Arrival(began_s, began_s + waited_s + 2e6)
    other = Claim(1, "0" * 16, at(began_s + later_s + 1e6))
    is_earlier = later_s < -START_TOLERANCE_S - 1
    is_close_or_later = later_s > -START_TOLERANCE_S + 1
    found = started_later(other, Claimed("pod", 1e6), arrival, is_ending=True)
    assert not (is_earlier and found)
    assert found or not is_close_or_later


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, START_TOLERANCE_S))
def test_where_the_order_is_not_known_the_pod_that_claims_takes_over(at_s: float, age_s: float, closer_s: float) -> None:
    here = Arrival(at_s - age_s, at_s)
    same = Claim(1, "0" * 16, at(at_s))
    assert not started_later(same, None, here)
    assert not started_later(same, Claimed("pod", None), here)
    assert not started_later(same, Claimed("pod", age_s), None)
    assert not started_later(Claim(1, "0" * 16), Claimed("pod", 0), here)
    assert not started_later(same, Claimed("pod", max(0.0, age_s - closer_s + 0.1)), here)
    assert not started_later(Claim(1, "0" * 16, at(at_s + 3600)), Claimed("pod", 0), here), "the store's clock was set back"


@given(st.lists(st.integers(0, 7200), max_size=12))
def test_many_takeovers_within_ten_minutes_are_said(ages_s: list[int]) -> None:
    there = [Claim(number + 1, "0" * 16, at(7200 - age_s)) for number, age_s in enumerate(sorted(ages_s, reverse=True))]
    recent = sum(age_s < min(ages_s) + TURNS_WITHIN_S for age_s in ages_s)
    assert (takeovers_in_turns(there) is not None) == (recent >= TURNS)


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


@given(st.floats(0, 20), st.floats(0, 20), st.lists(st.floats(0.5, 1), min_size=4, max_size=40))
def test_a_slow_store_does_not_make_a_pod_that_flushes_count_as_dead(
    request_s: float, read_s: float, shares: list[float]
) -> None:
    """Signs of life and looks at them, each by requests that take half of the longest time or more."""
    signs = itertools.accumulate(2 + 2 * request_s * share for share in shares)
    written_s = list(signs)
    beat_s = 2 + 2 * request_s * min(shares)  # what the pod knows of itself at its first sign
    now_s, seen_s, number = 0.0, 0.0, -1
    for share in itertools.cycle(shares):
        now_s += 1 + read_s * share
        newest = sum(sign_s <= now_s - read_s * share for sign_s in written_s) - 1
        if newest + 1 == len(written_s):
            break
        if newest != number:
            seen_s, number = now_s, newest
        if number >= 0:
            assert now_s - seen_s < ending_silence_s(beat_s, read_s=read_s * min(shares))


def test_a_pod_that_died_while_it_was_ending_is_not_waited_for_longer_on_a_fast_store() -> None:
    assert ending_silence_s(2.4, read_s=0.2) == ENDING_SILENCE_S
    assert ending_silence_s(None, read_s=0.0) == ENDING_SILENCE_S


def test_a_pod_is_of_a_run_by_the_name_of_its_job_or_of_the_run() -> None:
    pod = Holder("pod-1", is_unique=True, node=None, job="team/train", run_id=None)
    assert re.fullmatch("[0-9a-f]{16}", pod.id)
    assert pod.id != replace(pod, name="pod-2").id
    assert pod.is_of(Run("r", job="team/train"))
    assert not pod.is_of(Run("r", job="team/other"))
    assert not replace(pod, job=None).is_of(Run("r"))
    assert replace(pod, job=None, run_id="r").is_of(Run("r", job="team/other"))


def test_epochs_that_no_prefix_reaches_are_not_believed() -> None:
    known, holder = Claim(MOST_EPOCH, "0" * 16), "1" * 16
    assert claims_among([(known.key, ""), (Claim(MOST_EPOCH + 1, holder).key, ""), (Claim(99_999_999, holder).key, "")]) == [
        known
    ]
    assert next_claim([], holder, known_epoch=MOST_EPOCH).epoch == 1
    assert next_claim([known], holder).epoch == MOST_EPOCH + 1, "the caller refuses it"


def test_a_holder_that_says_it_ends_for_ever_is_waited_for_a_day_at_most() -> None:
    for ends_in_s, beat_s in ((1e18, 1e18), (math.inf, math.inf), (1e18, None)):
        run = Run("run", holder="other", ending=True, ends_in_s=ends_in_s, beat_s=beat_s)
        assert waits_for_ending(run, run, me="me", watched_s=0.0, silent_s=0.0)
        assert not waits_for_ending(run, run, me="me", watched_s=86_400.0, silent_s=0.0)
        assert not waits_for_ending(run, run, me="me", watched_s=1000.0, silent_s=901.0)


@pytest.mark.parametrize(
    ("run", "is_over"),
    [
        (Run("run", holder="pod", epoch=2, ending=True, ends_in_s=None), True),
        (Run("run", holder="pod", epoch=2, ending=True, ends_in_s=4.0), False),
        (Run("run", holder="pod", epoch=2), False),
        (Run("run", holder="earlier", epoch=1, ending=True, ends_in_s=None), False),
    ],
)
def test_a_pod_has_ended_once_it_says_so_in_its_own_epoch(run: Run, is_over: bool) -> None:
    assert has_ended(run, Claim(2, "0" * 16)) is is_over
