from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.lifecycle.prefix_ownership import (
    ASK_POLL_S,
    CHECK_S,
    MOST_ATTEMPTS,
    SILENCE_S,
    Ownership,
    Run,
    awaits_declaration,
    belongs,
    declared_later,
    left_for,
    may_hold,
    why_not,
    with_attempt,
)

names = st.none() | st.sampled_from(["a", "b"])
runs = st.builds(Run, st.sampled_from(["r", "s"]), names, names, st.integers(0, 3), st.booleans())


@given(runs, st.sampled_from(["r", "s"]), names)
def test_a_named_run_is_joined_by_its_name_alone(run: Run, run_id: str, job: str | None) -> None:
    assert (belongs(run, run_id=run_id, job=job) is Ownership.OURS) == (run.run_id == run_id)


@given(runs, names)
def test_without_a_name_only_a_job_that_is_known_to_be_another_is_refused(run: Run, job: str | None) -> None:
    refused = belongs(run, run_id=None, job=job) is not Ownership.OURS
    assert refused == (run.job is not None and job is not None and run.job != job)


@given(runs, runs, names, st.floats(0, 100))
def test_a_restart_of_the_same_pod_or_job_is_never_refused_and_never_waits(
    first: Run, now: Run, job: str | None, watched_s: float
) -> None:
    assert may_hold(first, replace(now, holder="me"), me="me", job=job, watched_s=watched_s) is Ownership.OURS
    if job is not None:
        assert may_hold(first, replace(now, job=job), me="me", job=job, watched_s=watched_s) is Ownership.OURS


@given(runs, names, st.floats(0, 100))
def test_a_holder_that_is_silent_is_waited_for_and_then_replaced(run: Run, job: str | None, watched_s: float) -> None:
    verdict = may_hold(run, run, me="me", job=job, watched_s=watched_s)
    assert verdict in (Ownership.OURS, Ownership.WATCH)
    assert watched_s < SILENCE_S or verdict is Ownership.OURS


def test_a_holder_that_beats_while_it_is_watched_is_another_job() -> None:
    run = Run("r", None, "other", beat=1)
    later = replace(run, beat=2)
    assert may_hold(run, later, me="me", job="mine", watched_s=1) is Ownership.TWO_AT_ONCE
    assert may_hold(run, replace(later, ending=True), me="me", job="mine", watched_s=1) is Ownership.OURS
    assert 3 * ASK_POLL_S < SILENCE_S < CHECK_S


@given(st.lists(st.sampled_from("abcdefghijklmnopqrstuvwxyz"), max_size=40))
def test_the_latest_attempts_that_node_0_said_are_its_own_are_known(said: list[str]) -> None:
    run = Run("r")
    for attempt in said:
        run = with_attempt(run, attempt)
    assert len(run.attempts) == len(set(run.attempts)) == min(MOST_ATTEMPTS, len(set(said)))
    assert not said or run.attempts[-1] == said[-1]


def test_other_nodes_write_what_node_0_said_is_its_own_and_node_0_says_it_while_it_holds_the_prefix() -> None:
    run = with_attempt(Run("r", holder="first"), "a-1")
    assert why_not(run, me="first", index=0, attempt="a-2", job=None) is None
    assert why_not(run, me="other", index=1, attempt="a-1", job=None) is None
    refused = why_not(run, me="other", index=1, attempt="b-1", job=None)
    assert refused is not None
    assert "attempt b-1" in refused
    assert "first" in refused
    assert "first" in (why_not(run, me="second", index=0, attempt="b-1", job=None) or "")
    assert why_not(replace(run, ending=True), me="second", index=0, attempt="b-1", job=None) is None


@given(
    st.integers(0, 5),
    st.integers(0, 5),
    st.none() | st.integers(0, 5),
    st.lists(st.sampled_from("abc"), max_size=3, unique=True),
)
def test_a_node_commits_an_attempt_once_the_present_holder_has_declared_it_or_others(
    epoch: int, claimed: int, known: int | None, attempts: list[str]
) -> None:
    run = Run("r", epoch=epoch, attempts=tuple(attempts))
    reason = awaits_declaration(run, claimed_epoch=claimed, attempt="a", known_epoch=known)
    if claimed > epoch:
        assert reason is not None
        assert "is taking the prefix over" in reason
    elif "a" in attempts:
        assert reason is None
    else:
        # Only a holder with a later claim than the one that declared the attempt can have left it out.
        assert (reason is None) == (bool(attempts) and (known is None or epoch > known))


@given(st.lists(st.sampled_from("abcd"), max_size=4, unique=True), st.sampled_from("abcd"), st.sampled_from("abcd"))
def test_attempts_are_ordered_by_their_declarations(attempts: list[str], one: str, other: str) -> None:
    found, back = declared_later(attempts, one, other), declared_later(attempts, other, one)
    if one not in attempts and other not in attempts:
        assert found is back is None
    elif one == other:
        assert found is back is False
    else:
        assert found is not back
        assert found is (one in attempts and (other not in attempts or attempts.index(one) > attempts.index(other)))


@given(st.lists(st.integers(0, 99), max_size=4), st.integers(0, 99))
def test_an_attempt_is_left_for_one_that_began_later_by_the_ids_alone(declared: list[int], mine: int) -> None:
    ids = [f"202601010000{second:02}Z-a".replace("0101", "0101T", 1) for second in declared]
    attempt = f"202601010000{mine:02}Z-b".replace("0101", "0101T", 1)
    assert (left_for(attempt, ids) is not None) is any(second > mine for second in declared)
    assert left_for("an id without a time", ids) is None
    assert left_for(attempt, ["another without a time"]) is None
