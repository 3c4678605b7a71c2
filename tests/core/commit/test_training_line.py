from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.commit import training_line
from sidecar.core.commit.training_line import (
    Committed,
    Origin,
    finished_later,
    origin_of,
    present_line,
    was_finished_later,
)
from sidecar.core.format.attempts import NOTHING_SEEN, Seen
from sidecar.core.format.found_checkpoint import Finished
from trainer_hook.contract import META_RESTORED, META_TRAIN_CALL, Node, rfc3339


def written(step: int, attempt: str, at_s: float, origin: Origin | None = None) -> Committed:
    return Committed(f"checkpoint-{step}", step, attempt, rfc3339(at_s), origin)


def began(hour: int) -> str:
    return f"20270115T{hour:02}0000Z-a"


def steps(commits: list[Committed]) -> list[int]:
    return [commit.step for commit in present_line(commits)]


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Committed], list[int]]:
    """What attempts leave that each continue from some step of the line before them; and the line of the last one."""
    luck = draw(st.randoms(use_true_random=False))
    tells = draw(st.booleans())
    there: dict[int, Committed] = {}
    line: list[int] = []
    at_s = 1.8e9
    for hour in range(draw(st.integers(1, 5))):
        base = luck.choice([0, *line])
        origin = Origin(base, there[base].attempt) if base and tells else None
        line = [step for step in line if step <= base]
        step = base
        for _ in range(luck.randint(1, 5)):
            step, at_s = step + luck.randint(1, 4), at_s + 60
            there[step] = written(step, began(hour), at_s, origin)
            line.append(step)
    shuffled = list(there.values())
    random.Random(0).shuffle(shuffled)
    return shuffled, sorted(line, reverse=True)


@given(histories())
def test_the_line_is_what_the_last_attempt_wrote_and_what_it_continued_from(given: tuple[list[Committed], list[int]]) -> None:
    commits, wanted = given
    found = steps(commits)
    assert found[: found.index(wanted[0]) + 1] == [wanted[0]], "what was written last goes first"
    assert set(wanted) <= set(found)
    assert found == sorted(set(found), reverse=True)
    if all(commit.origin is not None for commit in commits if commit.attempt != began(0)):
        assert found == wanted


@given(histories())
def test_the_order_in_which_commits_are_read_does_not_matter(given: tuple[list[Committed], list[int]]) -> None:
    assert present_line(given[0]) == present_line(given[0][::-1])


@given(histories(), st.data())
def test_what_was_deleted_takes_nothing_of_the_line_with_it(
    given: tuple[list[Committed], list[int]], data: st.DataObject
) -> None:
    """Deletions and losses remove commits at random; the remaining commits of the line stay in it."""
    commits, wanted = given
    left = [commit for commit in commits if commit.step == wanted[0] or data.draw(st.booleans())]
    assert {commit.step for commit in left} & set(wanted) <= set(steps(left))


def test_a_run_that_went_back_leaves_the_higher_steps_behind() -> None:
    left_behind = [written(step, began(1), step) for step in (200, 300, 400)]
    present = [written(step, began(2), 1000 + step) for step in (210, 220)]
    assert steps(left_behind + present) == [220, 210, 200]


def test_steps_between_the_origin_and_the_first_new_one_belong_to_the_line_that_was_left() -> None:
    left_behind = [written(step, began(1), step) for step in (200, 205, 300)]
    present = written(210, began(2), 1000)
    assert steps([*left_behind, present]) == [210, 205, 200]
    assert steps([*left_behind, replace(present, origin=Origin(200, began(1)))]) == [210, 200]


def test_a_step_that_is_written_again_belongs_to_the_line_and_what_came_after_it_does_not() -> None:
    assert steps([written(200, began(1), 1), written(300, began(2), 9), written(400, began(1), 3)]) == [300, 200]


def test_a_run_that_goes_back_to_a_line_that_it_had_left_has_nothing_of_the_one_between() -> None:
    first = [written(step, began(1), step) for step in (100, 200, 300)]
    between = written(110, began(2), 1000, Origin(100, began(1)))
    back = written(310, began(3), 2000, Origin(300, began(1)))
    assert steps([*first, between, back]) == [310, 300, 200, 100]


def test_an_attempt_is_later_than_the_one_that_it_continued_whatever_their_clocks_say() -> None:
    before = [written(step, began(5), 5000 + step) for step in (300, 400)]
    after = [written(step, began(1), step, Origin(400, began(5))) for step in (410, 420)]
    assert steps(before + after) == [420, 410, 400, 300]


def test_without_times_steps_count_as_written_in_their_order() -> None:
    same = [Committed(f"checkpoint-{step}", step, "a") for step in (10, 30, 20)]
    assert steps(same) == [30, 20, 10]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["step", "attempt"]), inner),
)


@given(st.dictionaries(st.sampled_from(["resumed_from", "other"]), anything))
def test_any_meta_gives_an_origin_or_none(meta: dict[str, object]) -> None:
    origin = origin_of(meta)
    assert origin is None or origin.step >= 0


def test_an_origin_is_read() -> None:
    assert origin_of({"resumed_from": {"step": 200, "attempt": "a"}}) == Origin(200, "a")
    assert origin_of({"resumed_from": {"step": 200}}) == Origin(200, None)
    assert origin_of({"resumed_from": {"step": 0}}) == Origin(0, None)
    assert origin_of({"resumed_from": {"step": True}}) is None


@given(histories(), st.randoms(use_true_random=False))
def test_with_epochs_the_line_does_not_depend_on_clocks(given: tuple[list[Committed], list[int]], luck: random.Random) -> None:
    commits, _ = given
    attempts = sorted({commit.attempt for commit in commits})
    epoch_of = {attempt: number for number, attempt in enumerate(attempts, 1)}
    told = [replace(commit, epoch=epoch_of[commit.attempt]) for commit in commits]
    wrong = {attempt: f"{began(luck.randint(0, 23))}-{epoch_of[attempt]}" for attempt in attempts}

    def set_wrong(commit: Committed) -> Committed:
        origin = commit.origin
        return replace(
            commit,
            attempt=wrong[commit.attempt],
            origin=origin and Origin(origin.step, wrong.get(origin.attempt or "")),
        )

    assert steps([set_wrong(commit) for commit in told]) == steps(commits)


def test_commits_that_are_already_in_order_are_compared_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = training_line.was_later
    monkeypatch.setattr(training_line, "was_later", lambda *given, **more: asked.append(1) or real(*given, **more))
    commits = [written(step, began(1), 1.8e9 + step) for step in range(2000)]
    random.Random(1).shuffle(commits)
    assert len(present_line(commits)) == 2000
    assert len(asked) <= 2 * 2000


ATTEMPT, BEHIND = "20260301T120000Z-a", "20260301T115500Z-b"


def finished(step: int | None, at_s: float, *, attempt: str = "a", nodes: int = 1) -> Finished:
    name = "final" if step is None else f"checkpoint-{step}"
    return Finished(name, "v", step, None, attempt, Node(0, nodes), at_s, None, (), {})


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_higher_step_of_an_attempt_was_finished_later_whatever_the_clock_says(nodes: int) -> None:
    one, other = finished(10, 1.8e9, nodes=nodes), finished(20, 1.8e9 - 9000, nodes=nodes)
    assert was_finished_later(other, one)
    assert was_finished_later(one, other) is (nodes == 1)  # alone, a trainer that starts again may keep its attempt
    assert not was_finished_later(one, finished(20, 1.8e9 + 1, nodes=nodes))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (finished(20, 1.8e9), finished(10, 1.8e9 + 1, attempt="b")),
        (finished(20, 1.8e9), replace(finished(10, 1.8e9 + 1), meta={META_TRAIN_CALL: 1})),
        (finished(20, 1.8e9), replace(finished(10, 1.8e9 + 1), names_attempt=False)),
        (finished(20, 1.8e9), finished(None, 1.8e9 + 1)),
        (finished(None, 1.8e9), finished(10, 1.8e9 + 1)),
        (finished(10, 1.8e9), finished(10, 1.8e9 + 1)),
    ],
)
def test_otherwise_times_tell_what_was_finished_later(one: Finished, other: Finished) -> None:
    assert was_finished_later(other, one)
    assert not was_finished_later(one, other)


def test_of_a_clock_that_was_set_back_only_what_steps_and_times_agree_on_is_certain() -> None:
    before = [finished(step, 1.8e9 + step) for step in (10, 20)]
    after = [finished(step, 1.8e9 - 9000 + step) for step in (30, 40)]
    assert [finished_later(each, [*before, *after]) for each in (*before, *after)] == [1, 0, 1, 0]
    assert finished_later(before[0], []) == 0
    within_a_ms = [replace(finished(step, 1.8e9), marked_at_s=float(step)) for step in (10, 20)]
    unnamed = [replace(its, names_attempt=False) for its in within_a_ms]
    assert [finished_later(each, unnamed) for each in unnamed] == [1, 0]


@pytest.mark.parametrize(
    ("seen", "is_later"),
    [
        (NOTHING_SEEN, False),
        (Seen(present="20260301T115500Z-b"), True),
        (Seen(found_in={ATTEMPT: 1, "20260301T115500Z-b": 2}), True),
    ],
)
def test_an_attempt_that_the_pod_saw_begin_later_is_later_also_if_rank_0_is_on_a_node_with_another_clock(
    seen: Seen, is_later: bool
) -> None:
    one = finished(40, 1.8e9, attempt=ATTEMPT, nodes=2)
    other = finished(20, 1.8e9 + 60, attempt=BEHIND, nodes=2)
    assert was_finished_later(other, one, seen) is is_later
    assert was_finished_later(other, replace(one, meta={META_RESTORED: "0" * 16}), seen), (
        "it had resumed from that, or passed it over"
    )
    assert was_finished_later(one, other, seen) is not is_later
    assert finished_later(one, [other], seen) == int(is_later)


def test_of_what_earlier_pods_left_a_download_may_be_the_later_one() -> None:
    """Another volume's attempt went on, and a pod downloaded its step: the next pod took the older step for the newer one."""
    ours = replace(finished(40, 1.8e9, attempt=BEHIND), is_inherited=True)
    theirs = replace(finished(60, 1.8e9 + 60, attempt=ATTEMPT), meta={META_RESTORED: "0" * 16}, is_inherited=True)
    assert not was_finished_later(ours, theirs)


def test_what_was_downloaded_was_not_finished_later_and_what_an_earlier_pod_left_was_earlier() -> None:
    one, other = finished(10, 1.8e9), finished(20, 1.8e9 + 1)
    assert not was_finished_later(replace(other, meta={META_RESTORED: "0" * 16}), one)
    assert not was_finished_later(replace(other, is_inherited=True), one)
    assert was_finished_later(one, replace(other, is_inherited=True))
