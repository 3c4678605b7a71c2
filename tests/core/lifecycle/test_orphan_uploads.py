from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.lifecycle.orphan_uploads import ABANDONED_AFTER_S, ORPHAN_AFTER_S, PROBE_S, is_abandoned, is_orphan, quiet_s
from sidecar.core.lifecycle.phases import LONGEST_GRACE_S
from tests import strategies

PROBE = ".ckpt-probe/x"
ours = st.one_of(strategies.small_steps.map(lambda step: f"checkpoint-{step}/model"), st.just("final/model"))
others = st.sampled_from(
    ["weights.bin", "checkpoint-007/model", "checkpoint-20.tmp/model", "logs/checkpoint-20/x", "checkpoint-20"]
)
ages = st.floats(0, 1e9)
young = st.none() | st.floats(0, ORPHAN_AFTER_S)
newest = st.none() | strategies.small_steps
times = st.floats(1.0, 2e9)


def judged(key: str, age_s: float | None, **known: Any) -> bool:
    facts = {"continued": (), "given_up": (), "alone": True, "newest_committed_step": None} | known
    return is_orphan(key, "u", quiet_s=age_s, **facts)


@given(ours | others | st.just(PROBE), st.none() | ages, st.booleans(), newest, st.booleans())
def test_what_a_journal_continues_is_never_an_orphan(
    key: str, age_s: float | None, alone: bool, step: int | None, is_given_up: bool
) -> None:
    given_up = {"u"} if is_given_up else set()
    assert not judged(key, age_s, continued={"u"}, given_up=given_up, alone=alone, newest_committed_step=step)


@given(ours, young, st.booleans(), newest)
def test_what_a_pod_in_its_longest_grace_period_may_be_sending_is_spared(
    key: str, age_s: float | None, alone: bool, step: int | None
) -> None:
    assert ORPHAN_AFTER_S > LONGEST_GRACE_S
    assert not judged(key, age_s, alone=alone, newest_committed_step=step)


@given(ours, ages, newest)
def test_of_a_lone_node_everything_that_was_quiet_for_longer_is_an_orphan(key: str, more_s: float, step: int | None) -> None:
    assert judged(key, ORPHAN_AFTER_S + 1 + more_s, newest_committed_step=step)


@given(strategies.small_steps, ages, newest)
def test_what_another_node_may_continue_is_spared_whatever_its_age(step: int, more_s: float, newest_step: int | None) -> None:
    is_old = newest_step is not None and step < newest_step
    key, age_s = f"checkpoint-{step}/m", ORPHAN_AFTER_S + 1 + more_s
    assert judged(key, age_s, alone=False, newest_committed_step=newest_step) == is_old


@given(others, ages, st.booleans())
def test_what_this_system_did_not_begin_is_left_alone(key: str, age_s: float, alone: bool) -> None:
    assert not judged(key, age_s, alone=alone, newest_committed_step=10**9)


@given(ours | st.just(PROBE), st.none() | ages)
def test_what_this_node_gave_up_itself_is_an_orphan_at_once(key: str, age_s: float | None) -> None:
    assert judged(key, age_s, given_up={"u"}, alone=False)


@given(st.integers(0, 10_000), st.none() | ages)
def test_beside_a_commit_only_what_has_no_parts_or_was_quiet_for_long_is_aborted(parts: int, age_s: float | None) -> None:
    is_old = age_s is not None and age_s > ABANDONED_AFTER_S
    assert is_abandoned(parts=parts, quiet_s=age_s) == (not parts or is_old)


def test_an_upload_is_abandoned_once_it_was_quiet_for_longer_than_that() -> None:
    assert [is_abandoned(parts=1, quiet_s=ABANDONED_AFTER_S + more_s) for more_s in (0, 1)] == [False, True]


def test_an_upload_of_a_lone_node_is_an_orphan_once_it_was_quiet_for_longer_than_that() -> None:
    assert [judged("final/model", ORPHAN_AFTER_S + more_s) for more_s in (0, 1)] == [False, True]


@given(st.booleans())
def test_a_probe_has_an_hour(alone: bool) -> None:
    for age_s, aborted in [(None, False), (PROBE_S, False), (PROBE_S + 1, True)]:
        assert judged(PROBE, age_s, alone=alone) == aborted


@given(times, times, st.lists(times), st.floats(-1e8, 1e8))
def test_an_upload_is_as_quiet_as_its_latest_part_and_no_clock_but_the_stores_counts(
    listed_at_s: float, begun_at_s: float, parts: list[float], shift_s: float
) -> None:
    silent_s = quiet_s(listed_at_s=listed_at_s, begun_at_s=begun_at_s, parts_stored_at_s=parts)
    assert silent_s is not None
    assert silent_s == max(0.0, min(listed_at_s - at_s for at_s in (begun_at_s, *parts)))
    if min(listed_at_s, begun_at_s, *parts) + shift_s > 1:
        moved = quiet_s(
            listed_at_s=listed_at_s + shift_s,
            begun_at_s=begun_at_s + shift_s,
            parts_stored_at_s=[at_s + shift_s for at_s in parts],
        )
        assert moved is not None
        assert abs(moved - silent_s) < 1e-3


@given(times, st.lists(times))
def test_where_the_store_says_no_time_nothing_is_old(at_s: float, parts: list[float]) -> None:
    assert quiet_s(listed_at_s=0.0, begun_at_s=at_s, parts_stored_at_s=parts) is None
    assert quiet_s(listed_at_s=at_s, begun_at_s=0.0, parts_stored_at_s=parts) is None
    assert quiet_s(listed_at_s=at_s, begun_at_s=1.0, parts_stored_at_s=[*parts, 0.0]) is None
