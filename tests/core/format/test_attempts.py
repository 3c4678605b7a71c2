from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.format.attempts import (
    Restart,
    Seen,
    began,
    began_after,
    began_later,
    first_found,
    goes_after,
    is_later,
    of_pod,
    was_later,
)
from trainer_hook.contract import check_id, rfc3339

UID = "0f0e0d0c-0000-4000-8000-000000000001"
instants = st.integers(10**9, 2 * 10**9)
restarts = st.builds(Restart, st.integers(0, 10**9 - 1), st.sampled_from(["12345678-a", "87654321-b"]))


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True), instants, st.none() | restarts)
def test_the_attempt_of_a_pod_is_an_id_that_names_it(pod: str, since_s: int, restart: Restart | None) -> None:
    attempt = of_pod(pod, since_s=since_s, restart=restart)
    check_id(attempt, what="attempt")
    assert pod[:64] in attempt


@given(instants, instants, instants, instants)
def test_of_two_pods_the_one_that_began_later_goes_first_whenever_its_steps_were_finished(
    ours_s: int, theirs_s: int, our_end_s: int, their_end_s: int
) -> None:
    ours, theirs = (of_pod(UID, since_s=since_s) for since_s in (ours_s, theirs_s))
    later = (ours_s, our_end_s) > (theirs_s, their_end_s)
    assert goes_after(ours, rfc3339(our_end_s), theirs, rfc3339(their_end_s)) == later


@given(restarts, restarts, instants, instants)
def test_of_one_jobset_the_later_restart_goes_first_whatever_the_clocks_of_two_machines_say(
    ours: Restart, theirs: Restart, our_s: int, their_s: int
) -> None:
    mine, other = of_pod(UID, since_s=our_s, restart=ours), of_pod(UID, since_s=their_s, restart=theirs)
    is_later = goes_after(mine, rfc3339(our_s), other, rfc3339(their_s))
    if ours.jobset_uid == theirs.jobset_uid and ours.number != theirs.number:
        assert is_later == (ours.number > theirs.number)
    else:  # one that was deleted and made again under its name counts from zero
        assert is_later == (our_s > their_s)


@given(st.none() | restarts, st.none() | restarts, instants, instants)
def test_no_two_attempts_go_after_each_other(one: Restart | None, other: Restart | None, one_s: int, other_s: int) -> None:
    first, second = of_pod("a", since_s=one_s, restart=one), of_pod("b", since_s=other_s, restart=other)
    stamps = rfc3339(one_s), rfc3339(other_s)
    assert not (goes_after(first, stamps[0], second, stamps[1]) and goes_after(second, stamps[1], first, stamps[0]))


def test_the_hooks_ids_are_ordered_by_their_time() -> None:
    earlier, later = "20260301T120000Z-ffffffff", "20260301T120001Z-00000000"
    assert goes_after(later, rfc3339(0), earlier, rfc3339(9))
    assert not goes_after(earlier, rfc3339(9), later, rfc3339(0))
    assert goes_after("theirs", rfc3339(9), earlier, rfc3339(0)), "an id without a time: what was finished later"


def test_an_id_alone_says_that_its_attempt_began_later_if_both_have_a_time() -> None:
    earlier, later = "20260301T120000Z-f", "20260301T120001Z-0"
    assert began_later(later, earlier)
    assert not began_later(earlier, later)
    assert not began_later(later, later)
    assert not began_later(later, "without a time")
    assert not began_later("without a time", earlier)


def test_of_two_stamps_a_malformed_one_is_the_earlier() -> None:
    stamps = ["no time", rfc3339(1), rfc3339(2)]
    assert [[is_later(one, other) for other in stamps] for one in stamps] == [
        [False, False, False],
        [True, False, False],
        [True, True, False],
    ]


epochs = st.integers(1, 9)


@given(epochs, epochs, instants, instants, st.none() | restarts, st.none() | restarts)
def test_the_later_pod_goes_first_whatever_the_clocks_of_two_machines_say(
    ours: int, theirs: int, our_s: int, their_s: int, our_restart: Restart | None, their_restart: Restart | None
) -> None:
    mine, other = of_pod("a", since_s=our_s, restart=our_restart), of_pod("b", since_s=their_s, restart=their_restart)
    stamps = rfc3339(our_s), rfc3339(their_s)
    by_clocks = goes_after(mine, stamps[0], other, stamps[1])
    both = began(mine), our_s, began(other), their_s
    assert was_later(*both, epochs=(ours, theirs)) == (by_clocks if ours == theirs else ours > theirs)
    for unknown in ((None, theirs), (ours, None), (None, None)):
        assert was_later(*both, epochs=unknown) == by_clocks


@given(
    st.integers(0, 99),
    st.integers(0, 99),
    st.dictionaries(st.sampled_from(["one", "other"]), st.integers(1, 3)),
    st.sampled_from(["one", "other", "a third one", None]),
)
def test_what_a_pod_saw_decides_which_attempt_began_after_another_and_else_their_ids(
    one: int, other: int, scans: dict[str, int], present: str | None
) -> None:
    ids = {"one": f"20260101T0000{one:02}Z-a", "other": f"20260101T0000{other:02}Z-b"}
    seen = Seen(present and ids.get(present, present), {ids[name]: scan for name, scan in scans.items()})
    is_after = began_after(ids["one"], ids["other"], seen)
    if present in ids:
        assert is_after is (present == "one"), "the present one is the latest"
    elif len(scans) == 2 and scans["one"] != scans["other"]:
        assert is_after is (scans["one"] > scans["other"])
    else:
        assert is_after is (one > other)
    assert not began_after("an id without a time", ids["one"], seen)
    assert not began_after(ids["one"], ids["one"], seen)


@given(st.integers(0, 9), st.booleans(), st.booleans())
def test_what_was_there_at_the_start_has_one_number_and_what_an_earlier_pod_left_a_lower_one(
    scan: int, was_there: bool, is_inherited: bool
) -> None:
    number = first_found(scan, was_there=was_there, is_inherited=is_inherited)
    assert number == (0 if is_inherited else 1 if was_there else max(1, scan))
    assert is_inherited or number > first_found(scan, was_there=was_there, is_inherited=True)
