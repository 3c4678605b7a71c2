from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from sidecar.core.format.attempts import Seen
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
    may_hold,
    refusal,
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
    assert may_hold(run, run, me="me", job=job, watched_s=SILENCE_S) is Ownership.OURS


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


def test_the_latest_of_many_attempts_are_kept() -> None:
    run, said = Run("r"), [f"20260101T0000{second:02}Z-a" for second in range(MOST_ATTEMPTS + 1)]
    for number, attempt in enumerate(said, 1):
        run = with_attempt(run, attempt)
        assert run.attempts == tuple(said[max(0, number - MOST_ATTEMPTS) : number])


@given(st.permutations(range(1, 9)), st.integers(0, 3), st.booleans())
def test_attempts_that_are_declared_late_keep_their_order(declared: list[int], skew: int, is_found: bool) -> None:
    """A sidecar that was stopped meanwhile sends the newest checkpoint first, and so declares the latest attempt first."""
    # With skew, the clock went back between any two attempts: only the scans know their order.
    ids = {number: f"20260101T00000{9 - number if skew and is_found else number}Z-{number}" for number in declared}
    found = {ids[number]: number for number in declared} if is_found else {}
    run = Run("r")
    for number in declared:
        run = with_attempt(run, ids[number], Seen(found_in=found))
    assert run.attempts == tuple(ids[number] for number in sorted(declared))


def test_an_attempt_that_is_declared_is_not_forgotten_for_being_the_earliest() -> None:
    ids = [f"20260101T0000{second:02}Z-a" for second in range(MOST_ATTEMPTS + 2)]
    run = Run("r", attempts=tuple(ids[2:]))
    assert with_attempt(run, ids[0]).attempts == (ids[0], *ids[3:])
    assert with_attempt(with_attempt(run, ids[0]), ids[1]).attempts == (ids[1], *ids[3:])


def test_other_nodes_write_what_node_0_said_is_its_own_and_node_0_says_it_while_it_holds_the_prefix() -> None:
    run = with_attempt(Run("r", holder="first"), "a-1")
    assert refusal(run, me="first", index=0, attempt="a-2", job=None) is None
    assert refusal(run, me="other", index=1, attempt="a-1", job=None) is None
    refused = refusal(run, me="other", index=1, attempt="b-1", job=None)
    assert refused is not None
    assert "attempt b-1" in refused
    assert "first" in refused
    assert "first" in (refusal(run, me="second", index=0, attempt="b-1", job=None) or "")
    assert refusal(replace(run, ending=True), me="second", index=0, attempt="b-1", job=None) is None


def test_a_node_of_a_known_job_does_not_wait_for_the_first_declaration_of_node_0() -> None:
    run = Run("r", holder="first")
    assert refusal(run, me="other", index=1, attempt="a-1", job="team/train") is None
    assert refusal(run, me="other", index=1, attempt="a-1", job=None) == (
        "node 0 of attempt a-1 does not hold the prefix (first does): "
        "if its sidecar was refused, give this job its own prefix in CKPT_STORE"
    )
    assert refusal(replace(run, holder=None, attempts=("b-1",)), me="other", index=1, attempt="a-1", job="team/train") == (
        "node 0 of attempt a-1 does not hold the prefix: if its sidecar was refused, give this job its own prefix in CKPT_STORE"
    )
    assert refusal(run, me="other", index=0, attempt="a-1", job=None) == (
        "the prefix is held by first: a later pod of this job, or another job; "
        "set CKPT_RUN_ID or JOB_NAME, so that pods know their job"
    )


@given(
    st.integers(0, 5),
    st.integers(0, 5),
    st.none() | st.integers(0, 5),
    st.lists(st.sampled_from("abc"), max_size=3, unique=True),
    st.booleans(),
)
@example(epoch=1, claimed=0, known=2, attempts=["b"], has_later=False)
@example(epoch=1, claimed=0, known=None, attempts=["b"], has_later=False)
@example(epoch=1, claimed=0, known=None, attempts=["b"], has_later=True)
def test_a_node_commits_an_attempt_once_the_present_holder_has_declared_it_or_others(
    epoch: int, claimed: int, known: int | None, attempts: list[str], has_later: bool
) -> None:
    run = Run("r", epoch=epoch, attempts=tuple(attempts))
    reason = awaits_declaration(run, claimed_epoch=claimed, attempt="a", known_epoch=known, has_later=has_later)
    if claimed > epoch:
        assert reason == "a later pod of node 0 is taking the prefix over; it declares its attempt first"
    elif "a" in attempts:
        assert reason is None
    else:
        # Only a holder with a later claim than the one that declared the attempt can have left it out. One that was never
        # seen to be declared may still be, until the trainer is in a later one.
        assert (reason is None) == (bool(attempts) and (has_later if known is None else epoch > known))


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
