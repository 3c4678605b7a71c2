from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.schedule.order import (
    BESIDE_S,
    LATEST,
    Waiting,
    overtakes,
    send_order,
    superseded,
    upload_order,
    waits_for_last_parts,
)
from tests import strategies


def a_waiting(step: int | None, urgent: bool, overtook: bool) -> Waiting:
    return Waiting("final", None, True, overtook) if step is None else Waiting(f"checkpoint-{step}", step, urgent, overtook)


waiting = st.builds(a_waiting, st.none() | strategies.steps | strategies.small_steps, st.booleans(), st.booleans())
queues = st.lists(waiting, max_size=8, unique_by=lambda w: w.step)


@given(queues, st.randoms(use_true_random=False))
def test_the_upload_order_is_total(queue: list[Waiting], random: object) -> None:
    shuffled = list(queue)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert upload_order(shuffled) == upload_order(queue)
    assert sorted(w.name for w in upload_order(queue)) == sorted(w.name for w in queue)


@given(queues)
def test_urgent_ones_go_first_and_among_equals_the_newest(queue: list[Waiting]) -> None:
    order = upload_order(queue)
    for earlier, later in pairwise(order):
        if earlier.urgent == later.urgent:
            assert later.step is not None
            assert earlier.step is None or earlier.step > later.step
        else:
            assert earlier.urgent


def test_neighbouring_steps_are_told_apart_however_large() -> None:
    large = [Waiting(f"checkpoint-{10**17 + n}", 10**17 + n, urgent=False) for n in range(4)]
    assert upload_order(large) == large[::-1]


@given(waiting, waiting)
def test_of_two_at_most_one_overtakes_the_other(one: Waiting, other: Waiting) -> None:
    assert not (overtakes(one, other) and overtakes(other, one))


@given(waiting)
def test_nothing_overtakes_itself(one: Waiting) -> None:
    assert not overtakes(one, one)


@given(waiting, waiting)
def test_what_overtakes_comes_first_in_the_order(newer: Waiting, running: Waiting) -> None:
    if newer.step != running.step and overtakes(newer, running):
        assert upload_order([newer, running])[0] == newer


@given(waiting, waiting)
def test_an_upload_that_overtook_is_let_through_by_all_but_more_urgent_ones(newer: Waiting, running: Waiting) -> None:
    if overtakes(newer, replace(running, overtook=True)):
        assert newer.urgent
        assert not running.urgent


@given(waiting, waiting)
def test_urgent_ones_overtake_every_periodic_one(newer: Waiting, running: Waiting) -> None:
    assert overtakes(replace(newer, urgent=True), replace(running, urgent=False))
    assert not overtakes(replace(newer, urgent=False), replace(running, urgent=True))


@given(queues, st.none() | strategies.steps | strategies.small_steps)
def test_superseded_is_what_is_older_than_the_newest_durable_step(queue: list[Waiting], newest: int | None) -> None:
    names = {w.name for w in superseded(queue, newest_committed_step=newest)}
    assert names == {w.name for w in queue if newest is not None and w.step is not None and w.step < newest}


def test_the_newest_durable_step_itself_is_not_superseded() -> None:
    waiting = [Waiting(f"checkpoint-{step}", step, urgent=False) for step in (10, 20, 30)]
    assert [w.name for w in superseded(waiting, newest_committed_step=20)] == ["checkpoint-10"]


def test_one_that_the_store_refuses_goes_last_even_if_it_is_urgent() -> None:
    refused, older = Waiting("checkpoint-30", 30, urgent=True, refused=True), Waiting("checkpoint-10", 10, urgent=False)
    assert upload_order([refused, older]) == [older, refused]


# A whole run: one part takes one unit of time, every checkpoint has as many parts.


@dataclass
class Run:
    """What the uploader does with these rules, in parts: it uploads the first of the order and looks up after each part."""

    upload_parts: int
    left: dict[int, int] = field(default_factory=dict)
    overtook: set[int] = field(default_factory=set)
    running: int | None = None
    commits: list[tuple[int, int]] = field(default_factory=list)
    """Time and step."""

    def waiting(self, step: int) -> Waiting:
        return Waiting(f"checkpoint-{step}", step, urgent=False, overtook=step in self.overtook)

    def finished(self, step: int) -> None:
        self.left[step] = self.upload_parts
        first = upload_order(self.waiting(s) for s in self.left)[0]
        if self.running is not None and first.step is not None and overtakes(first, self.waiting(self.running)):
            self.overtook.add(first.step)
            self.running = first.step

    def send_a_part(self, now: int) -> None:
        if self.running is None and self.left:
            self.running = upload_order(self.waiting(s) for s in self.left)[0].step
        if self.running is None:
            return
        self.left[self.running] -= 1
        if self.left[self.running] == 0:
            del self.left[self.running]
            self.commits.append((now + 1, self.running))
            self.running = None


def run(*, interval: int, upload_parts: int, until: int) -> Run:
    """Save every ``interval`` parts; the step is the time at which it was finished."""
    state = Run(upload_parts)
    for now in range(until):
        if now % interval == 0:
            state.finished(now)
        state.send_a_part(now)
    return state


@given(st.integers(2, 30).flatmap(lambda upload: st.tuples(st.integers(1, upload), st.just(upload))))
def test_under_a_save_interval_shorter_than_the_upload_commits_keep_coming(times: tuple[int, int]) -> None:
    interval, upload_parts = times
    until = 20 * upload_parts
    commits = run(interval=interval, upload_parts=upload_parts, until=until).commits
    ends = [0, *(at for at, _ in commits), until]
    # Each commit follows within the one upload that was overtaken for at most an interval and the one let through.
    assert max(later - earlier for earlier, later in pairwise(ends)) <= upload_parts + interval


@given(st.integers(2, 30).flatmap(lambda upload: st.tuples(st.integers(1, upload), st.just(upload))))
def test_the_newest_durable_state_is_never_older_than_two_uploads_and_a_save_interval(times: tuple[int, int]) -> None:
    interval, upload_parts = times
    until = 20 * upload_parts
    commits = run(interval=interval, upload_parts=upload_parts, until=until).commits
    newest = 0
    for at, step in [*commits, (until, until)]:
        assert at - newest <= 2 * upload_parts + interval
        newest = max(newest, step)


@given(st.integers(2, 30).flatmap(lambda upload: st.tuples(st.integers(1, upload), st.just(upload))))
def test_each_commit_is_newer_than_the_one_before(times: tuple[int, int]) -> None:
    interval, upload_parts = times
    steps = [step for _, step in run(interval=interval, upload_parts=upload_parts, until=20 * upload_parts).commits]
    assert steps == sorted(set(steps))


@given(st.lists(st.integers(0, 60), unique=True, min_size=1, max_size=8), st.integers(1, 12))
def test_once_the_saves_end_everything_becomes_durable_without_sending_a_part_twice(
    saves: list[int], upload_parts: int
) -> None:
    state, now = Run(upload_parts), 0
    while now <= max(saves) or state.left:
        if now in saves:
            state.finished(now)
        state.send_a_part(now)
        now += 1
        assert now <= max(saves) + 1 + len(saves) * upload_parts
    assert {step for _, step in state.commits} == set(saves)


@pytest.mark.parametrize("upload_parts", [3, 10])
def test_when_each_save_has_time_to_land_every_one_does_in_turn(upload_parts: int) -> None:
    state = run(interval=upload_parts, upload_parts=upload_parts, until=5 * upload_parts)
    assert state.commits == [((n + 1) * upload_parts, n * upload_parts) for n in range(5)]


def test_step_0_is_older_than_step_1() -> None:
    first, second = Waiting("checkpoint-0", 0, urgent=False), Waiting("checkpoint-1", 1, urgent=False)
    assert upload_order([first, second]) == [second, first]


def test_a_checkpoint_that_is_being_written_preempts_nothing_and_one_of_several_nodes_is_not_preempted() -> None:
    old, new = (Waiting(f"checkpoint-{step}", step, urgent=False) for step in (10, 20))
    assert overtakes(new, old)
    assert not overtakes(replace(new, written=False), old)
    assert not overtakes(new, replace(old, shared=True))
    assert upload_order([replace(new, written=False), old]) == [old, replace(new, written=False)]


@pytest.mark.parametrize(("left", "waits"), [(20, False), (21, True)])
def test_last_parts_are_waited_for_until_they_are_nearly_through(left: int, waits: bool) -> None:
    assert waits_for_last_parts(left_bytes=left, bytes_per_s=50.0, link_bytes_per_s=100.0) is waits
    assert waits_for_last_parts(left_bytes=left, bytes_per_s=None, link_bytes_per_s=100.0) is waits
    assert not waits_for_last_parts(left_bytes=left, bytes_per_s=49.0, link_bytes_per_s=100.0)


def test_final_without_a_step_goes_before_the_jit_save() -> None:
    jit, final = Waiting("checkpoint-70", 70, urgent=True), Waiting("final", None, urgent=True)
    assert upload_order([jit, final]) == [final, jit]


def test_a_jit_save_overtakes_a_periodic_upload_that_overtook_another() -> None:
    assert overtakes(Waiting("checkpoint-30", 30, urgent=True), Waiting("checkpoint-20", 20, urgent=False, overtook=True))


def test_a_newer_periodic_save_pauses_the_older_but_not_the_one_that_paused_it() -> None:
    old, newer, newest = (Waiting(f"checkpoint-{step}", step, urgent=False) for step in (10, 20, 30))
    assert overtakes(newer, old)
    assert not overtakes(newest, replace(newer, overtook=True))


@given(queues, st.integers(0, 7))
def test_the_running_upload_stays_first_unless_another_one_preempts_it(queue: list[Waiting], number: int) -> None:
    running = queue[number % len(queue)] if queue else None
    order = send_order(queue, running=running.name if running else "checkpoint-0")
    assert sorted(w.name for w in order) == sorted(w.name for w in queue)
    if running is not None:
        first = upload_order(queue)[0]
        assert order[0] is (first if overtakes(first, running) else running)


@given(waiting, waiting)
def test_everything_preempts_an_upload_that_the_store_refuses(one: Waiting, other: Waiting) -> None:
    assert overtakes(one, replace(other, refused=True))
    assert not overtakes(replace(one, refused=True), other)


# Several nodes, whose uploads take longer than the time to the next save, and not equally long.

INTERVAL = 8
"""Parts that a usual node sends from one save to the next."""


def sent_by(node: random.Random, upload_parts: float, *, saves: int) -> dict[int, float]:
    """Return when a node has sent which of the saved steps, in saves: it sends as ``send_order`` says."""
    left: dict[int, float] = {}
    sent: dict[int, float] = {}
    running: int | None = None
    parts = upload_parts * node.uniform(0.9, 1.1)
    for tick in range(saves * INTERVAL):
        if tick % INTERVAL == 0:
            step = 10 * (tick // INTERVAL + 1)
            left[step] = parts * node.uniform(0.9, 1.1)
        waiting = [Waiting(str(step), step, urgent=False, shared=True, begun=step == running) for step in left]
        order = send_order(waiting, running=None if running is None else str(running), newest_sent=max(sent, default=None))
        if not order:
            continue
        running = order[0].step
        assert running is not None
        left[running] -= 1
        if left[running] <= 0:
            del left[running]
            sent[running], running = tick / INTERVAL, None
    return sent


@pytest.mark.parametrize("load", [0.7, 1.1, 1.3, 1.7, 2.5, 4.0])
@pytest.mark.parametrize("nodes", [2, 12])
def test_nodes_that_cannot_send_all_send_the_same_ones(load: float, nodes: int) -> None:
    saves = 80
    by_node = [sent_by(random.Random(f"{node} {load}"), load * INTERVAL, saves=saves) for node in range(nodes)]
    durable = sorted((max(sent[step] for sent in by_node), step) for step in set.intersection(*map(set, by_node)))
    ages = [at / 10 - max((step for when, step in durable if when <= at / 10), default=0) / 10 for at in range(200, 10 * saves)]
    assert max(ages) <= 2 + 5 * load, "saves since the newest step that is durable"


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=12, unique=True), st.none() | st.integers(0, 1000))
def test_of_several_nodes_each_sends_one_of_the_latest_first(steps: list[int], newest_sent: int | None) -> None:
    waiting = [Waiting(str(step), step, urgent=False, shared=True) for step in steps]
    order = send_order(waiting, running=None, newest_sent=newest_sent)
    assert sorted(order, key=str) == sorted(waiting, key=str)
    latest = sorted((step for step in steps if newest_sent is None or step > newest_sent), reverse=True)[:LATEST]
    assert order[0].step == max(latest or [max(steps)], key=lambda step: (step & -step, step) if latest else (0, step))
    assert [c.step for c in order[1:]] == sorted((step for step in steps if step != order[0].step), reverse=True)


def test_of_several_nodes_all_choose_the_step_that_is_even_most_often_among_newer_ones_than_the_last() -> None:
    def order(*steps: int, newest_sent: int | None = None) -> list[int | None]:
        waiting = [Waiting(str(step), step, urgent=False, shared=True) for step in steps]
        return [c.step for c in send_order(waiting, running=None, newest_sent=newest_sent)]

    assert order(0, 8) == [0, 8]
    assert order(6, 8, 9) == [8, 9, 6]
    assert order(8, 9, 11, newest_sent=8) == [11, 9, 8]
    assert order(8, 9, newest_sent=9) == [9, 8]
    assert order(0, 3, newest_sent=0) == [3, 0]
    begun = [Waiting("8", 8, urgent=False, shared=True), Waiting("9", 9, urgent=False, shared=True, begun=True)]
    assert [c.step for c in send_order(begun, running=None)] == [9, 8]
    alone = [Waiting("8", 8, urgent=False), Waiting("9", 9, urgent=False)]
    assert [c.step for c in send_order(alone, running=None)] == [9, 8]


def test_urgent_ones_of_several_nodes_keep_their_place() -> None:
    jit, periodic = Waiting("3", 3, urgent=True, shared=True), Waiting("8", 8, urgent=False, shared=True)
    assert send_order([periodic, jit], running="8") == [jit, periodic]


rates = st.floats(1, 1e10)


@given(st.integers(0, 1 << 40), st.none() | rates, st.none() | rates)
def test_large_files_wait_for_last_parts_that_the_link_limits(left: int, their: float | None, link: float | None) -> None:
    waits = waits_for_last_parts(left_bytes=left, bytes_per_s=their, link_bytes_per_s=link)
    assert waits == (link is not None and left > BESIDE_S * link and (their is None or their >= link / 2))
