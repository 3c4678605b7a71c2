from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.commit.retention import (
    TURN_S,
    Deletion,
    Kept,
    StorePlan,
    plan_local_deletion,
    plan_store_deletion,
    surplus_steps,
    turn_after_s,
)
from sidecar.core.commit.training_line import Committed, present_line
from trainer_hook.contract import Node, rfc3339


@st.composite
def kept(draw: st.DrawFn) -> list[Kept]:
    steps = draw(st.lists(st.integers(0, 60), unique=True, max_size=12))
    reasons = st.sampled_from([None, None, "the run resumes from it"])
    committed = [Kept(f"checkpoint-{step}", step, draw(st.integers(0, 100)), draw(reasons)) for step in steps]
    return committed + draw(st.sampled_from([[], [Kept("final", None, 50)]]))


def newest(checkpoints: list[Kept]) -> str | None:
    steps = [c for c in checkpoints if c.step is not None]
    return max(steps, key=lambda c: c.step or 0).name if steps else None


def untouchable(checkpoints: list[Kept]) -> set[str | None]:
    return {newest(checkpoints), "final"} | {c.name for c in checkpoints if c.protected}


counts = st.integers(1, 6)
spaces = st.integers(0, 500)
strides = st.none() | st.integers(1, 20)


@st.composite
def stores(draw: st.DrawFn) -> tuple[list[Committed], set[str]]:
    """What is committed, by several attempts in any order, and what of it was seen whole."""
    found = draw(
        st.dictionaries(
            st.integers(0, 60),
            st.tuples(st.integers(1, 3), st.integers(0, 99), st.integers(0, 3), st.sampled_from("012")),
            max_size=12,
        )
    )
    is_told = draw(st.booleans())  # some stores do not say when an object was written
    commits = [
        Committed(
            f"checkpoint-{step}",
            step,
            f"20270115T{hour:02}0000Z-a",
            rfc3339(1.8e9 + at_s),
            seen_s=seen_s,
            modified=modified * is_told,
        )
        for step, (hour, at_s, seen_s, modified) in found.items()
    ]
    return commits, {commit.name for commit in commits if draw(st.integers(0, 3))}


def plan_of(
    given: tuple[list[Committed], set[str]], keep_newest: int, every: int | None = None, protected: dict[str, str] | None = None
) -> StorePlan:
    commits, whole = given
    return plan_store_deletion(commits, whole=whole, keep_newest=keep_newest, keep_every_steps=every, protected=protected or {})


def names(deletions: list[Deletion]) -> set[str]:
    return {deletion.name for deletion in deletions}


@given(stores(), counts, strides)
def test_what_goes_from_the_store_has_enough_newer_ones_of_its_line_that_were_seen_whole(
    given: tuple[list[Committed], set[str]], keep_newest: int, every: int | None
) -> None:
    commits, whole = given
    plan = plan_of(given, keep_newest, every)
    line = {commit.name for commit in present_line(commits)}
    by_name = {commit.name: commit for commit in commits}
    for deletion in plan.deletions:
        gone = by_name[deletion.name]
        newer = [
            c
            for c in commits
            if c.step > gone.step and c.name in line & whole and c.seen_s >= gone.seen_s and c.modified >= gone.modified
        ]
        assert len(newer) >= keep_newest
        assert not {c.name for c in newer[-keep_newest:]} & names(plan.deletions) or len(newer) > keep_newest
        assert deletion.reason
        assert not every or gone.step % every


@given(stores(), counts, strides)
def test_what_makes_others_go_stays_itself(
    given: tuple[list[Committed], set[str]], keep_newest: int, every: int | None
) -> None:
    commits, whole = given
    counted = [c.name for c in present_line(commits) if c.name in whole][:keep_newest]
    assert not set(counted) & names(plan_of(given, keep_newest, every).deletions)


@given(stores(), counts, strides)
def test_the_highest_step_and_the_newest_of_the_line_never_go(
    given: tuple[list[Committed], set[str]], keep_newest: int, every: int | None
) -> None:
    commits = given[0]
    gone = names(plan_of(given, keep_newest, every).deletions)
    if commits:
        assert max(commits, key=lambda commit: commit.step).name not in gone
    sound = [commit.name for commit in present_line(commits) if commit.name in given[1]]
    assert not sound or sound[0] not in gone


@given(stores(), counts, strides, st.lists(st.integers(0, 60), max_size=3))
def test_the_last_step_of_each_train_call_never_goes(
    given: tuple[list[Committed], set[str]], keep_newest: int, every: int | None, ends: list[int]
) -> None:
    commits = [replace(commit, train_call=sum(end < commit.step for end in ends)) for commit in given[0]]
    gone = names(plan_of((commits, given[1]), keep_newest, every).deletions)
    line = present_line(commits)
    last = {commit.train_call: commit.name for commit in reversed(line)}
    last.pop(max(last, default=0), None)
    assert not set(last.values()) & gone
    of_one_call = names(plan_of(given, keep_newest, every).deletions)
    assert of_one_call - gone <= set(last.values()), "nothing else stays for it"


@given(stores(), counts, strides)
def test_what_stays_although_its_step_is_old_has_a_reason(
    given: tuple[list[Committed], set[str]], keep_newest: int, every: int | None
) -> None:
    plan = plan_of(given, keep_newest, every)
    steps = sorted((commit.step for commit in given[0]), reverse=True)
    surplus = {f"checkpoint-{step}" for step in steps[keep_newest:] if not every or step % every}
    counted = [commit.name for commit in present_line(given[0]) if commit.name in given[1]][:keep_newest]
    assert names(plan.deletions) | names(plan.kept) == surplus - set(counted)
    assert not names(plan.deletions) & names(plan.kept)
    found = surplus_steps(steps, keep_newest=keep_newest, keep_every_steps=every)
    assert surplus == {f"checkpoint-{step}" for step in found}


@given(stores(), counts, strides)
def test_where_all_is_whole_and_of_one_line_as_many_as_asked_for_and_the_steps_of_the_stride_stay(
    given: tuple[list[Committed], set[str]], keep_newest: int, every: int | None
) -> None:
    commits = [replace(commit, attempt="a", created_at=None, seen_s=0.0, modified="") for commit in given[0]]
    steps = sorted((commit.step for commit in commits), reverse=True)
    plan = plan_of((commits, {commit.name for commit in commits}), keep_newest, every)
    assert [d.name for d in plan.deletions] == [
        f"checkpoint-{step}" for step in reversed(steps[keep_newest:]) if not every or step % every
    ]


@given(stores(), counts, strides)
def test_after_a_plan_was_carried_out_nothing_is_left_to_delete(
    given: tuple[list[Committed], set[str]], keep_newest: int, every: int | None
) -> None:
    gone = names(plan_of(given, keep_newest, every).deletions)
    left = [commit for commit in given[0] if commit.name not in gone]
    again = plan_of((left, given[1] - gone), keep_newest, every)
    # Fewer steps may make more of the line: never less.
    assert {c.name for c in present_line(given[0])} - gone <= {c.name for c in present_line(left)}
    assert len(again.deletions) <= len(left)


@given(stores(), counts)
def test_what_is_protected_stays_and_says_why(given: tuple[list[Committed], set[str]], keep_newest: int) -> None:
    protected = {commit.name: "the run resumes from it" for commit in given[0]}
    plan = plan_of(given, keep_newest, protected=protected)
    assert not plan.deletions
    assert {kept.reason for kept in plan.kept} <= {"the run resumes from it"}


@given(kept(), counts, spaces, spaces)
def test_the_volume_never_loses_the_newest_nor_the_protected_nor_final(
    durable: list[Kept], keep_newest: int, free_bytes: int, min_free_bytes: int
) -> None:
    plan = plan_local_deletion(durable, keep_newest=keep_newest, free_bytes=free_bytes, min_free_bytes=min_free_bytes)
    assert not {deletion.name for deletion in plan} & untouchable(durable)
    assert len({deletion.name for deletion in plan}) == len(plan)
    assert all(deletion.reason for deletion in plan)


@given(kept(), counts, spaces)
def test_with_enough_space_the_volume_keeps_its_number(durable: list[Kept], keep_newest: int, free_bytes: int) -> None:
    plan = plan_local_deletion(durable, keep_newest=keep_newest, free_bytes=free_bytes, min_free_bytes=0)
    steps = sorted((c.step for c in durable if c.step is not None), reverse=True)
    surplus = {f"checkpoint-{step}" for step in steps[keep_newest:]}
    assert {d.name for d in plan} == surplus - {c.name for c in durable if c.protected}


@given(kept(), counts, spaces, spaces)
def test_when_space_is_short_only_as_many_more_go_as_are_needed(
    durable: list[Kept], keep_newest: int, free_bytes: int, min_free_bytes: int
) -> None:
    plain = plan_local_deletion(durable, keep_newest=keep_newest, free_bytes=free_bytes, min_free_bytes=0)
    plan = plan_local_deletion(durable, keep_newest=keep_newest, free_bytes=free_bytes, min_free_bytes=min_free_bytes)
    sizes = {c.name: c.size_bytes for c in durable}
    extra = [d.name for d in plan if d not in plain]
    freed = free_bytes + sum(sizes[d.name] for d in plan)
    if extra:
        assert freed - sizes[extra[-1]] < min_free_bytes
    if freed < min_free_bytes:
        # Nothing more could go.
        assert {c.name for c in durable} - {d.name for d in plan} <= untouchable(durable)


def test_what_is_protected_is_passed_over_where_space_is_short() -> None:
    durable = [Kept("checkpoint-1", 1, 10, protected="in use"), Kept("checkpoint-2", 2, 10), Kept("checkpoint-3", 3, 10)]
    plan = plan_local_deletion(durable, keep_newest=3, free_bytes=0, min_free_bytes=10)
    assert [deletion.name for deletion in plan] == ["checkpoint-2"]


def of_line(*steps: int, attempt: str = "a", at_s: float = 0.0, seen_s: float = 0.0) -> list[Committed]:
    return [Committed(f"checkpoint-{s}", s, attempt, rfc3339(1.8e9 + at_s + s), None, "", seen_s) for s in steps]


def whole_but(commits: list[Committed], *steps: int) -> tuple[list[Committed], set[str]]:
    return commits, {commit.name for commit in commits if commit.step not in steps}


def test_the_two_newest_of_four_stay() -> None:
    plan = plan_of(whole_but(of_line(10, 40, 20, 30)), 2)
    assert [(d.name, d.reason) for d in plan.deletions] == [
        ("checkpoint-10", "2 newer are committed and were seen whole"),
        ("checkpoint-20", "2 newer are committed and were seen whole"),
    ]


def test_every_hundredth_step_stays_for_ever() -> None:
    plan = plan_of(whole_but(of_line(*range(0, 301, 50))), 1, 100)
    assert [d.name for d in plan.deletions] == ["checkpoint-50", "checkpoint-150", "checkpoint-250"]


def test_what_is_damaged_never_counts_and_goes_no_sooner_than_an_older_good_one() -> None:
    commits = of_line(300, 400, 410)
    assert plan_of(whole_but(commits, 400), 2) == StorePlan([], [])
    one = plan_of(whole_but(commits, 300, 400), 2)
    assert not one.deletions
    assert [kept.reason for kept in one.kept] == ["1 of 2 higher steps of the present line were seen whole"]
    two = plan_of(whole_but([*commits, *of_line(420)], 400), 2)
    assert names(two.deletions) == {"checkpoint-300", "checkpoint-400"}


def test_steps_beyond_the_one_that_a_run_went_back_to_push_nothing_out_and_go_once_they_are_passed() -> None:
    left_behind, back = of_line(200, 300, 400), of_line(210, 220, attempt="b", at_s=1000)
    assert names(plan_of(whole_but(left_behind + back), 2).deletions) == {"checkpoint-200"}
    passed = of_line(310, 320, attempt="b", at_s=1000)
    plan = plan_of(whole_but(left_behind + passed), 2)
    assert names(plan.deletions) == {"checkpoint-200", "checkpoint-300"}
    kept = {d.name: d.reason for d in plan_of(whole_but(left_behind + of_line(210, 420, attempt="b", at_s=1000)), 2).kept}
    assert set(kept) == {"checkpoint-300"}
    assert kept["checkpoint-300"].startswith("a lower step was committed later, so the run went back; 1 of 2 higher steps")


def test_what_was_committed_while_this_node_looked_on_goes_for_nothing_that_was_there_before() -> None:
    """Also where nothing in the store tells that the run went back."""
    there, then = of_line(300, 400), of_line(210, seen_s=60.0)
    nothing_tells = [replace(commit, created_at=None) for commit in there + then]
    plan = plan_of(whole_but(nothing_tells), 2)
    stays = "it was committed later than higher steps: it stays until further ones are committed"
    assert (plan.deletions, plan.kept) == ([], [Deletion("checkpoint-210", stays)])


def reasons(deletions: list[Deletion]) -> dict[str, str]:
    return {deletion.name: deletion.reason for deletion in deletions}


def test_what_the_policy_keeps_says_why() -> None:
    store = whole_but([replace(commit, train_call=int(commit.step > 200)) for commit in of_line(100, 200, 300, 400)])
    one, two = plan_of(store, 1, 100), plan_of(store, 2)
    assert reasons(one.retained) == {
        **dict.fromkeys(["checkpoint-100", "checkpoint-200", "checkpoint-300"], "a multiple of 100 steps"),
        "checkpoint-400": "the newest",
    }
    assert reasons(two.retained) == {
        "checkpoint-200": "the last of train() call 0, with which a new pod begins",
        **dict.fromkeys(["checkpoint-300", "checkpoint-400"], "one of the 2 newest"),
    }
    assert reasons(two.deletions) == {"checkpoint-100": "2 newer are committed and were seen whole"}


def test_of_the_present_train_call_only_the_newest_are_kept_by_the_policy() -> None:
    damaged_and_newest = of_line(210, attempt="b", at_s=1000)
    plan = plan_of(whole_but(of_line(200, 300) + damaged_and_newest, 210), 1)
    assert reasons(plan.retained) == {"checkpoint-200": "the newest", "checkpoint-300": "the newest"}
    assert reasons(plan.kept) == {"checkpoint-210": "0 of 1 higher steps of the present line were seen whole"}


def test_an_abandoned_step_is_not_the_last_of_its_train_call() -> None:
    left_behind = of_line(200, 300)
    back = [replace(commit, train_call=1) for commit in of_line(210, 310, attempt="b", at_s=1000)]
    assert reasons(plan_of(whole_but(left_behind + back), 1).deletions) == dict.fromkeys(
        ["checkpoint-210", "checkpoint-300"], "a newer one is committed and was seen whole"
    )


def test_what_is_protected_is_listed_as_kept() -> None:
    plan = plan_of(whole_but(of_line(10, 20)), 1, protected={"checkpoint-10": "the run resumes from it"})
    assert reasons(plan.kept) == {"checkpoint-10": "the run resumes from it"}


def test_a_step_does_not_count_as_one_that_is_newer_than_itself() -> None:
    one, *others = of_line(10, 20, 30)
    seen_before, seen_with_it = others[0], replace(others[1], seen_s=60.0)
    plan = plan_of(whole_but([replace(one, seen_s=60.0), seen_before, seen_with_it]), 2)
    assert (plan.deletions, set(reasons(plan.kept))) == ([], {"checkpoint-10"})


@pytest.mark.parametrize(
    ("older", "newer", "goes"), [("1", "2", True), ("1", "1", True), ("2", "1", False), ("1", "", True), ("", "1", True)]
)
def test_a_higher_step_that_the_store_says_was_written_earlier_does_not_count(older: str, newer: str, goes: bool) -> None:
    low, high = of_line(10, 20)
    plan = plan_of(whole_but([replace(low, modified=older), replace(high, modified=newer)]), 1)
    assert names(plan.deletions) == ({"checkpoint-10"} if goes else set())


def test_nodes_take_turns() -> None:
    assert [turn_after_s(node) for node in (None, Node(0, 3), Node(2, 3))] == [0.0, 0.0, 2 * TURN_S]


def test_a_short_disk_takes_the_oldest_of_the_kept_first_and_leaves_the_newest() -> None:
    durable = [Kept(f"checkpoint-{step}", step, size_bytes=10) for step in (10, 20, 30)]
    one = plan_local_deletion(durable, keep_newest=3, free_bytes=0, min_free_bytes=5)
    assert [d.name for d in one] == ["checkpoint-10"]
    all_but_newest = plan_local_deletion(durable, keep_newest=3, free_bytes=0, min_free_bytes=1000)
    assert [d.name for d in all_but_newest] == ["checkpoint-10", "checkpoint-20"]
    assert "less than 1000 bytes" in all_but_newest[0].reason


def test_a_disk_that_lacks_one_byte_is_short() -> None:
    durable = [Kept(f"checkpoint-{step}", step, size_bytes=10) for step in (10, 20)]
    assert len(plan_local_deletion(durable, keep_newest=2, free_bytes=4, min_free_bytes=5)) == 1


def test_a_disk_with_exactly_the_space_asked_for_is_not_short() -> None:
    durable = [Kept(f"checkpoint-{step}", step, size_bytes=10) for step in (10, 20)]
    assert plan_local_deletion(durable, keep_newest=2, free_bytes=5, min_free_bytes=5) == []
