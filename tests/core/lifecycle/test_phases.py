from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sidecar.core.lifecycle.phases import (
    COMMIT_CHECK_S,
    CONTAINERS_START_WITHIN_S,
    EXIT_S,
    LEAST_RELEASE_S,
    RELEASE_S,
    REPORT_S,
    Phase,
    Situation,
    is_success_of_this_pod,
    longest_commit_check_s,
    longest_release_s,
    margin_s,
    next_phase,
)

ORDER = list(Phase)

phases = st.sampled_from(Phase)
situations = st.builds(Situation, *[st.booleans()] * 9)
IDLE = Situation(
    ready=True,
    notice=False,
    sigterm=False,
    trainer_alive=True,
    trainer_succeeded=False,
    classic=False,
    everything_durable=True,
    deadline_passed=False,
    cut_short=False,
)


def walk(*situations: Situation, phase: Phase = Phase.STARTING) -> list[Phase]:
    passed = []
    for situation in situations:
        phase = next_phase(phase, situation)
        passed.append(phase)
    return passed


def test_the_phases_are_declared_in_their_order() -> None:
    assert ORDER == [Phase.STARTING, Phase.RUNNING, Phase.DRAINING, Phase.FLUSHING, Phase.DONE]


@given(st.lists(situations, max_size=10), st.lists(situations, min_size=1, max_size=10))
def test_from_sigterm_on_there_is_no_way_back(before: list[Situation], after: list[Situation]) -> None:
    told = [replace(situation, sigterm=True) for situation in after]
    passed = walk(*before, *told)[len(before) :]
    positions = [ORDER.index(phase) for phase in passed]
    assert positions == sorted(positions)
    assert passed[0] in (Phase.DRAINING, Phase.FLUSHING, Phase.DONE)


@given(situations)
def test_done_is_final(situation: Situation) -> None:
    assert next_phase(Phase.DONE, situation) is Phase.DONE


@given(phases, situations)
def test_deciding_twice_changes_nothing(phase: Phase, situation: Situation) -> None:
    once = next_phase(phase, situation)
    assert next_phase(once, situation) is once


@given(phases, situations)
def test_a_second_sigterm_ends_it_at_once(phase: Phase, situation: Situation) -> None:
    assert next_phase(phase, replace(situation, cut_short=True)) is Phase.DONE


@given(phases, situations)
def test_after_sigterm_the_deadline_ends_it_whatever_else(phase: Phase, situation: Situation) -> None:
    assert next_phase(phase, replace(situation, sigterm=True, deadline_passed=True)) is Phase.DONE


@given(phases.filter(lambda phase: phase is not Phase.DONE), situations)
def test_it_ends_before_the_deadline_only_when_all_is_durable_and_the_trainer_gone(phase: Phase, now: Situation) -> None:
    now = replace(now, cut_short=False, deadline_passed=False)
    if next_phase(phase, now) is Phase.DONE:
        assert now.everything_durable
        assert not now.trainer_alive
        assert now.sigterm or (now.classic and now.trainer_succeeded)


@given(phases.filter(lambda phase: phase is not Phase.DONE), situations)
def test_a_native_sidecar_never_ends_without_sigterm(phase: Phase, now: Situation) -> None:
    now = replace(now, sigterm=False, cut_short=False, classic=False)
    assert next_phase(phase, now) is not Phase.DONE


@given(phases, situations)
def test_it_flushes_only_when_the_trainer_is_gone(phase: Phase, now: Situation) -> None:
    if next_phase(phase, now) is Phase.FLUSHING and phase is not Phase.FLUSHING:
        assert not now.trainer_alive
        assert now.notice or now.sigterm


@given(situations)
def test_whoever_is_told_to_go_ends_once_the_deadline_passes(now: Situation) -> None:
    now = replace(now, sigterm=True)
    assert walk(now, now, replace(now, deadline_passed=True))[-1] is Phase.DONE


def test_the_life_of_a_native_sidecar() -> None:
    gone = replace(IDLE, trainer_alive=False, everything_durable=False, notice=True)
    assert walk(
        replace(IDLE, ready=False),
        IDLE,
        replace(IDLE, notice=True),
        gone,
        replace(gone, sigterm=True),
        replace(gone, sigterm=True, everything_durable=True),
    ) == [Phase.STARTING, Phase.RUNNING, Phase.DRAINING, Phase.FLUSHING, Phase.FLUSHING, Phase.DONE]


def test_a_classic_sidecar_ends_by_itself_when_the_trainer_succeeded_and_all_is_durable() -> None:
    ended = replace(IDLE, classic=True, trainer_alive=False, trainer_succeeded=True, everything_durable=False)
    assert walk(IDLE, ended, replace(ended, everything_durable=True)) == [Phase.RUNNING, Phase.RUNNING, Phase.DONE]


def test_a_classic_sidecar_stays_for_a_trainer_that_failed_and_may_start_again() -> None:
    failed = replace(IDLE, classic=True, trainer_alive=False)
    assert walk(IDLE, failed, IDLE) == [Phase.RUNNING] * 3


def test_a_classic_sidecar_waits_for_the_save_of_a_trainer_that_got_sigterm_with_it() -> None:
    saving = replace(IDLE, classic=True, sigterm=True, everything_durable=False)
    saved = replace(saving, trainer_alive=False)
    assert walk(IDLE, saving, saved, replace(saved, everything_durable=True)) == [
        Phase.RUNNING,
        Phase.DRAINING,
        Phase.FLUSHING,
        Phase.DONE,
    ]


def test_a_notice_that_turns_out_to_be_void_leads_back_to_running() -> None:
    assert walk(IDLE, replace(IDLE, notice=True), IDLE) == [Phase.RUNNING, Phase.DRAINING, Phase.RUNNING]


def test_a_trainer_that_seems_to_live_again_does_not_stop_the_flush_after_sigterm() -> None:
    flushing = replace(IDLE, sigterm=True, trainer_alive=False, everything_durable=False)
    assert walk(flushing, replace(flushing, trainer_alive=True)) == [Phase.FLUSHING, Phase.FLUSHING]


instants = st.floats(1.7e9, 1.9e9)


@given(instants, instants, st.none() | instants)
def test_a_success_that_was_said_before_the_pod_was_there_is_of_an_earlier_run(
    said_s: float, since_s: float, ended_s: float | None
) -> None:
    is_ours = is_success_of_this_pod(updated_at_s=said_s, changed=False, pod_since_s=since_s, ended_in_order_at_s=ended_s)
    assert not is_ours or said_s >= since_s - CONTAINERS_START_WITHIN_S


def test_a_trainer_may_have_ended_a_minute_before_its_sidecar_began() -> None:
    for before_s, is_ours in ((CONTAINERS_START_WITHIN_S, True), (CONTAINERS_START_WITHIN_S + 1, False)):
        said_s = 1.8e9 - before_s
        assert is_ours is is_success_of_this_pod(
            updated_at_s=said_s, changed=False, pod_since_s=1.8e9, ended_in_order_at_s=None
        )


@given(instants, instants, st.floats(0, 1e6))
def test_a_success_that_a_life_ended_upon_is_not_believed_by_the_next(said_s: float, since_s: float, later_s: float) -> None:
    assert not is_success_of_this_pod(
        updated_at_s=said_s, changed=False, pod_since_s=since_s, ended_in_order_at_s=said_s + later_s
    )


@given(st.none() | instants, instants, st.none() | instants)
def test_a_success_that_is_said_now_is_believed_whatever_its_clock(
    said_s: float | None, since_s: float, ended_s: float | None
) -> None:
    assert is_success_of_this_pod(updated_at_s=said_s, changed=True, pod_since_s=since_s, ended_in_order_at_s=ended_s)


@given(instants, st.floats(0, 1e6))
def test_a_sidecar_that_was_down_while_its_trainer_succeeded_believes_it(since_s: float, later_s: float) -> None:
    assert is_success_of_this_pod(updated_at_s=since_s + later_s, changed=False, pod_since_s=since_s, ended_in_order_at_s=None)


@given(st.floats(1, 86_400))
def test_the_margin_leaves_at_least_half_of_every_whole_grace_period(grace_s: float) -> None:
    assert 0.5 <= margin_s(grace_s) <= 2.0
    assert margin_s(grace_s) <= grace_s / 2


@pytest.mark.parametrize(("grace_s", "kept_s"), [(1, 0.5), (10, 0.5), (30, 1.5), (40, 2.0), (600, 2.0)])
def test_the_margin_is_a_twentieth_of_the_grace_between_half_a_second_and_two(grace_s: float, kept_s: float) -> None:
    assert margin_s(grace_s) == kept_s


@given(st.none() | st.floats(0, 1e5))
@example(0.0)
def test_the_release_of_the_prefix_ends_before_the_grace_period(kill_in_s: float | None) -> None:
    longest_s = longest_release_s(kill_in_s)
    assert LEAST_RELEASE_S <= longest_s <= RELEASE_S
    if not kill_in_s:
        assert longest_s == LEAST_RELEASE_S
    elif kill_in_s > EXIT_S + LEAST_RELEASE_S:
        assert longest_s <= kill_in_s - EXIT_S + 1e-9


@given(st.none() | st.floats(0, 1e5))
@example(0.0)
def test_the_check_of_the_commits_leaves_time_for_the_report_and_the_exit(kill_in_s: float | None) -> None:
    longest_s = longest_commit_check_s(kill_in_s)
    assert 0 <= longest_s <= COMMIT_CHECK_S
    if kill_in_s is None or kill_in_s > COMMIT_CHECK_S + REPORT_S + EXIT_S:
        assert longest_s == COMMIT_CHECK_S
    elif longest_s:
        assert longest_s + REPORT_S + EXIT_S <= kill_in_s + 1e-9


def test_a_second_sigterm_ends_at_once() -> None:
    assert next_phase(Phase.RUNNING, replace(IDLE, sigterm=True, cut_short=True)) is Phase.DONE


def test_a_fenced_sidecar_ends_with_its_trainer_or_at_the_deadline() -> None:
    fenced = replace(IDLE, fenced=True)
    assert next_phase(Phase.RUNNING, fenced) is not Phase.DONE
    assert next_phase(Phase.RUNNING, replace(fenced, trainer_alive=False)) is Phase.DONE
    assert next_phase(Phase.RUNNING, replace(fenced, deadline_passed=True)) is Phase.DONE
