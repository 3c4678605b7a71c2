from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.core.schedule.flush import MOST_CANDIDATES, Costs, Load, Outcome, Plan, durable_in_s, plan_flush
from sidecar.core.schedule.order import Waiting
from sidecar.core.schedule.throughput import LONG_S, SHORT_S, Rate, RateEstimator, estimated

MB = 1_000_000


def a_load(
    step: int | None, left_bytes: int, *, urgent: bool = False, ready_in_s: float = 0.0, closed: int | None = None
) -> Load:
    name = "final" if step is None else f"checkpoint-{step}"
    return Load(Waiting(name, step, urgent or step is None), left_bytes, closed_bytes=closed, ready_in_s=ready_in_s)


def sure(bytes_per_s: float) -> Rate:
    return Rate(bytes_per_s, bytes_per_s, bytes_per_s)


sizes = st.integers(0, 100)
finished = st.builds(a_load, st.none() | st.integers(0, 30), sizes, urgent=st.booleans())
written = st.builds(
    a_load, st.integers(0, 30), sizes, urgent=st.just(True), ready_in_s=st.integers(0, 20).map(float), closed=st.none() | sizes
)
queues = st.lists(finished | written, max_size=4, unique_by=lambda load: load.waiting.name)
rates = st.tuples(*[st.integers(1, 20)] * 3).map(sorted).map(lambda r: Rate(*map(float, r)))
times = st.integers(0, 30).map(float)
durable = st.none() | st.integers(0, 30)


def landed(order: list[Load], bytes_per_s: float, left_s: float) -> list[Load]:
    done = durable_in_s(order, bytes_per_s=bytes_per_s)
    return [load for load in order if done[load.waiting.name] <= left_s]


def in_order(plan: Plan, loads: list[Load]) -> list[Load]:
    by_name = {load.waiting.name: load for load in loads}
    return [by_name[planned.name] for planned in plan.order]


def newest(loads: list[Load], base: int | None) -> float:
    steps = [float("inf") if load.waiting.step is None else load.waiting.step for load in loads]
    return max([*steps, -1 if base is None else base])


@given(queues, rates, times, durable)
def test_every_checkpoint_has_its_place_and_a_reason_where_it_may_be_late(
    loads: list[Load], rate: Rate, left_s: float, base: int | None
) -> None:
    plan = plan_flush(loads, rate=rate, left_s=left_s, newest_durable_step=base)
    assert sorted(p.name for p in plan.order) == sorted(load.waiting.name for load in loads)
    assert all((planned.reason is None) == (planned.verdict is Outcome.FITS) for planned in plan.order)


@given(queues, st.integers(1, 20), times, durable)
def test_the_newest_step_that_can_be_durable_by_the_deadline_will_be(
    loads: list[Load], bytes_per_s: int, left_s: float, base: int | None
) -> None:
    plan = plan_flush(loads, rate=sure(bytes_per_s), left_s=left_s, newest_durable_step=base)
    best = max(newest(landed(list(order), bytes_per_s, left_s), base) for order in permutations(loads))
    assert newest(landed(in_order(plan, loads), bytes_per_s, left_s), base) == best


@given(queues, st.integers(1, 20), times, durable)
def test_nothing_that_could_have_landed_is_displaced_by_what_does_not_land(
    loads: list[Load], bytes_per_s: int, left_s: float, base: int | None
) -> None:
    order = in_order(plan_flush(loads, rate=sure(bytes_per_s), left_s=left_s, newest_durable_step=base), loads)
    lands = landed(order, bytes_per_s, left_s)
    for late in order:
        if late not in lands:
            # Not even behind everything that lands would it have landed.
            assert late not in landed([*lands, late], bytes_per_s, left_s)
    assert landed(lands, bytes_per_s, left_s) == lands


@given(queues, rates, times, durable)
def test_what_cannot_land_at_any_rate_goes_behind_everything_that_may(
    loads: list[Load], rate: Rate, left_s: float, base: int | None
) -> None:
    plan = plan_flush(loads, rate=rate, left_s=left_s, newest_durable_step=base)
    hopeless = [load for load in loads if not landed([load], rate.high, left_s)]
    last = in_order(plan, loads)[len(loads) - len(hopeless) :]
    assert sorted(load.waiting.name for load in last) == sorted(load.waiting.name for load in hopeless)
    assert all(plan.get(load.waiting.name).verdict is Outcome.NO_TIME for load in hopeless)  # type: ignore[union-attr]


@settings(max_examples=40)
@given(queues, rates, times, durable)
def test_of_all_orders_it_is_the_one_with_the_highest_newest_step_to_be_expected(
    loads: list[Load], rate: Rate, left_s: float, base: int | None
) -> None:
    top = max([base or 0, *(load.waiting.step or 0 for load in loads)]) + 1

    def expected(order: list[Load]) -> float:
        found = [newest(landed(order, bytes_per_s, left_s), base) for bytes_per_s in rate.samples(9)]
        return sum(min(step, top) for step in found)

    order = in_order(plan_flush(loads, rate=rate, left_s=left_s, newest_durable_step=base), loads)
    assert expected(order) >= max(expected(list(other)) for other in permutations(loads)) - 1e-6


@given(queues, st.integers(1, 20), st.integers(1, 30), durable)
def test_more_time_never_makes_a_step_late(loads: list[Load], bytes_per_s: int, left_s: int, base: int | None) -> None:
    rate = sure(bytes_per_s)
    before, after = (
        newest(landed(in_order(plan_flush(loads, rate=rate, left_s=t, newest_durable_step=base), loads), bytes_per_s, t), base)
        for t in (left_s - 1, left_s)
    )
    assert after >= before


@given(queues, st.integers(1, 20))
def test_the_link_is_never_idle_while_anything_can_be_sent(loads: list[Load], bytes_per_s: int) -> None:
    ends = {max(durable_in_s(order, bytes_per_s=bytes_per_s).values(), default=0.0) for order in permutations(loads)}
    assert max(ends) - min(ends) < 1e-6


@given(queues, st.integers(1, 20))
def test_each_is_durable_no_sooner_than_alone_and_the_first_as_soon_as_alone(loads: list[Load], bytes_per_s: int) -> None:
    done = durable_in_s(loads, bytes_per_s=bytes_per_s)
    for place, load in enumerate(loads):
        alone_s = durable_in_s([load], bytes_per_s=bytes_per_s)[load.waiting.name]
        assert done[load.waiting.name] >= alone_s - 1e-6
        if place == 0:
            assert done[load.waiting.name] == pytest.approx(alone_s)


@given(queues, times, durable)
def test_before_anything_was_measured_the_newest_goes_first(loads: list[Load], left_s: float, base: int | None) -> None:
    plan = plan_flush(loads, rate=None, left_s=left_s, newest_durable_step=base)
    assert all((p.verdict, p.done_in_s) == (Outcome.MAY_FIT, None) for p in plan.order), "nobody knows whether it fits"
    assert {p.reason for p in plan.order} <= {"no rate has been measured yet"}
    for earlier, later in zip(in_order(plan, loads), in_order(plan, loads)[1:], strict=False):
        if earlier.waiting.urgent == later.waiting.urgent and earlier.waiting.written == later.waiting.written:
            assert newest([earlier], -1) >= newest([later], -1)


def test_a_store_that_stalls_keeps_the_upload_order() -> None:
    loads = [a_load(step, 10) for step in (10, 30, 20)]
    plan = plan_flush(loads, rate=Rate(0.0, 0.0, 0.0), left_s=5, newest_durable_step=None)
    assert [p.name for p in plan.order] == ["checkpoint-30", "checkpoint-20", "checkpoint-10"]
    assert {p.reason for p in plan.order} == {"nothing arrives in the store"}


OLDER_HALF_SENT, JIT = a_load(100, 50 * MB), a_load(120, 200 * MB, urgent=True)


@pytest.mark.parametrize(
    ("left_s", "first", "verdicts"),
    [
        (30, "checkpoint-120", {"checkpoint-120": Outcome.FITS, "checkpoint-100": Outcome.FITS}),
        (21, "checkpoint-120", {"checkpoint-120": Outcome.FITS, "checkpoint-100": Outcome.MAY_FIT}),
        (10, "checkpoint-100", {"checkpoint-120": Outcome.NO_TIME, "checkpoint-100": Outcome.FITS}),
        (4, "checkpoint-120", {"checkpoint-120": Outcome.NO_TIME, "checkpoint-100": Outcome.NO_TIME}),
    ],
)
def test_the_older_one_is_finished_exactly_where_the_newer_one_cannot_be(
    left_s: float, first: str, verdicts: dict[str, Outcome]
) -> None:
    plan = plan_flush([OLDER_HALF_SENT, JIT], rate=sure(10 * MB), left_s=left_s, newest_durable_step=80)
    assert plan.order[0].name == first
    assert {planned.name: planned.verdict for planned in plan.order} == verdicts


def test_a_safe_older_step_goes_before_a_newer_one_that_would_land_only_with_luck() -> None:
    rate = Rate(8 * MB, 10 * MB, 12 * MB)
    plan = plan_flush([OLDER_HALF_SENT, JIT], rate=rate, left_s=17.5, newest_durable_step=80)
    assert plan.order[0].name == "checkpoint-100"
    # … but not where next to nothing is gained by it.
    plan = plan_flush([OLDER_HALF_SENT, JIT], rate=rate, left_s=17.5, newest_durable_step=99)
    assert plan.order[0].name == "checkpoint-120"


def test_while_the_trainer_still_writes_the_older_one_goes_on() -> None:
    coming = a_load(120, 50 * MB, urgent=True, ready_in_s=5, closed=0)
    done = durable_in_s([coming, OLDER_HALF_SENT], bytes_per_s=10 * MB)
    assert done == {"checkpoint-100": 5.0, "checkpoint-120": 10.0}


def test_the_end_of_a_run_is_worth_one_step_more_than_its_newest_step() -> None:
    """At three of nine rates ``final`` lands, at seven the step; both together at none."""
    step, final = a_load(1, 30 * MB), a_load(None, 65 * MB)
    rate = Rate(1.0 * MB, 5.0 * MB, 9.0 * MB)
    assert plan_flush([step, final], rate=rate, left_s=10, newest_durable_step=0).order[0].name == "checkpoint-1"
    first = a_load(0, 30 * MB)
    assert plan_flush([first, final], rate=rate, left_s=10, newest_durable_step=None).order[0].name == "checkpoint-0"
    final = a_load(None, 45 * MB)  # at five
    assert plan_flush([step, final], rate=rate, left_s=10, newest_durable_step=0).order[0].name == "final"


def test_of_two_that_promise_as_much_the_newer_goes_first() -> None:
    """The newer one lands at three of nine rates, the older one, of half the steps, at six; both together at none."""
    loads = [a_load(1, 40 * MB), a_load(2, 70 * MB)]
    plan = plan_flush(loads, rate=Rate(1.0 * MB, 5.0 * MB, 9.0 * MB), left_s=10, newest_durable_step=0)
    assert plan.order[0].name == "checkpoint-2"


def test_at_a_byte_a_second_what_lands_still_goes_before_what_does_not() -> None:
    plan = plan_flush([a_load(30, 2), a_load(20, 99), a_load(10, 2)], rate=sure(1), left_s=10, newest_durable_step=None)
    assert [(p.name, p.verdict, p.done_in_s) for p in plan.order] == [
        ("checkpoint-30", Outcome.FITS, 2.0),
        ("checkpoint-10", Outcome.FITS, 4.0),
        ("checkpoint-20", Outcome.NO_TIME, 103.0),
    ]
    assert (
        plan.order[2].reason == "99 B are left and would be through in 1 min 43 s at 1 B/s with what goes first; 10 s are left"
    )


def test_a_step_that_is_durable_already_does_not_go_before_an_urgent_one() -> None:
    loads = [a_load(20, 10), a_load(10, 10, urgent=True)]
    plan = plan_flush(loads, rate=sure(1), left_s=100, newest_durable_step=20)
    assert [p.name for p in plan.order] == ["checkpoint-10", "checkpoint-20"]


def test_next_to_nothing_is_through_at_once() -> None:
    assert durable_in_s([a_load(10, 1)], bytes_per_s=1e9) == {"checkpoint-10": 0.0}


def test_what_the_store_refuses_goes_last() -> None:
    refused = replace(JIT, waiting=replace(JIT.waiting, refused=True))
    plan = plan_flush([OLDER_HALF_SENT, refused], rate=sure(10 * MB), left_s=60, newest_durable_step=None)
    assert [p.name for p in plan.order] == ["checkpoint-100", "checkpoint-120"]
    assert plan.order[1].reason == "the store refuses it"


def test_with_a_long_queue_the_one_that_is_nearly_through_is_not_forgotten() -> None:
    loads = [a_load(step, 40 * MB) for step in range(20, 20 + 2 * MOST_CANDIDATES)]
    loads.append(a_load(10, 1 * MB))
    plan = plan_flush(loads, rate=Rate(1 * MB, 3 * MB, 4.01 * MB), left_s=10, newest_durable_step=0)
    assert plan.order[0].name == "checkpoint-10"


def test_of_a_checkpoint_that_is_finished_and_written_anew_the_last_one_given_counts() -> None:
    anew, finished_one = a_load(10, 50 * MB, ready_in_s=9, closed=0), a_load(10, 10 * MB)
    plan = plan_flush([anew, finished_one], rate=sure(10 * MB), left_s=5, newest_durable_step=None)
    assert [(p.name, p.left_bytes, p.verdict) for p in plan.order] == [("checkpoint-10", 10 * MB, Outcome.FITS)]
    assert durable_in_s([anew, finished_one], bytes_per_s=10 * MB) == {"checkpoint-10": 1.0}


def test_requests_and_the_commit_take_time_too() -> None:
    many = replace(a_load(10, 0), left_requests=100)
    done = durable_in_s([many], bytes_per_s=MB, costs=Costs(request_s=0.01, commit_s=0.5))
    assert done["checkpoint-10"] == pytest.approx(1.5)


def flush(rng: random.Random, loads: dict[str, Load], *, mean: float, left_s: float) -> list[str]:
    """Send by the plan over a link whose rate wanders; return what lands. The rate is measured, not known."""
    sent, passed, now_s, done = RateEstimator(), 0, 0.0, []
    for _ in range(40):  # before the notice
        passed += round(mean * rng.uniform(0.8, 1.2) * 0.2)
        now_s += 0.2
        sent.sample(passed, now_s=now_s, busy=True)
    end_s = now_s + left_s
    while now_s < end_s and loads:
        rate = estimated(arrived=None, sent=sent, limit=None)
        plan = plan_flush(loads.values(), rate=rate, left_s=end_s - now_s, newest_durable_step=0)
        sent_bytes = round(mean * rng.uniform(0.8, 1.2) * 0.2)
        passed, now_s, first = passed + sent_bytes, now_s + 0.2, plan.order[0].name
        sent.sample(passed, now_s=now_s, busy=True)
        loads[first] = replace(loads[first], left_bytes=max(0, loads[first].left_bytes - sent_bytes))
        if not loads[first].left_bytes:
            done += [first] if now_s <= end_s else []
            del loads[first]
    return done


@pytest.mark.parametrize("seed", range(100))
def test_where_the_grace_period_fits_only_one_of_two_the_right_one_lands(seed: int) -> None:
    rng = random.Random(seed)
    mean, left_s = rng.uniform(5, 200) * MB, rng.uniform(3, 60)
    room = mean * left_s
    newer_fits = rng.random() < 0.5
    newer = room * (rng.uniform(0.5, 0.85) if newer_fits else rng.uniform(1.25, 4))
    older = room * (rng.uniform(1.05, 2) * (1 - newer / room) if newer_fits else rng.uniform(0.1, 0.85))
    loads = [a_load(rng.randrange(1, 500), round(older)), a_load(rng.randrange(501, 999), round(newer), urgent=True)]
    done = flush(rng, {load.waiting.name: load for load in loads}, mean=mean, left_s=left_s)
    assert loads[1 if newer_fits else 0].waiting.name in done


def test_a_link_that_changes_is_seen_within_seconds() -> None:
    sent = RateEstimator()
    for tick in range(100):
        sent.sample(tick * 2 * MB, now_s=tick * 0.2, busy=True)
    for tick in range(20):
        sent.sample(198 * MB + tick * 200_000, now_s=19.8 + tick * 0.2, busy=True)
    assert sent.bytes_per_s(SHORT_S) == pytest.approx(MB, rel=0.2)
    rate = estimated(arrived=10.0 * MB, sent=sent, limit=None)
    assert rate is not None
    assert rate.low < MB < 10 * MB < rate.high


def test_idle_time_is_not_taken_for_a_slow_link() -> None:
    sent = RateEstimator()
    for tick in range(10):
        sent.sample(tick * MB, now_s=tick * 1.0, busy=True)
    sent.sample(9 * MB, now_s=1000.0, busy=False)
    sent.sample(10 * MB, now_s=1001.0, busy=True)
    assert sent.bytes_per_s(LONG_S) == pytest.approx(MB)


def test_the_limit_stands_in_for_a_rate_and_caps_it() -> None:
    assert estimated(arrived=None, sent=RateEstimator(), limit=None) is None
    alone = estimated(arrived=None, sent=RateEstimator(), limit=100)
    assert alone is not None
    assert alone.high == 100
    capped = estimated(arrived=500.0, sent=RateEstimator(), limit=100)
    assert capped == Rate(100, 100, 100)


@given(st.lists(st.integers(0, 100), min_size=2, max_size=6, unique=True))
def test_some_two_of_several_are_ordered_as_the_two_alone(steps: list[int]) -> None:
    loads = [a_load(step, 10) for step in steps]
    plan = plan_flush(loads, rate=sure(1), left_s=1000, newest_durable_step=None)
    for one, other in combinations(loads, 2):
        first = one if (one.waiting.step or 0) > (other.waiting.step or 0) else other
        assert plan.rank()[first.waiting.name] == min(plan.rank()[load.waiting.name] for load in (one, other))


def test_nothing_is_expected_to_fit_while_nothing_is_known_to_arrive() -> None:
    load = Load(Waiting("checkpoint-1", 1, urgent=False), 1000)
    plan = plan_flush([load], rate=Rate(0.0, 0.0, 1e6), left_s=10.0, newest_durable_step=None)
    assert plan.rank() == {"checkpoint-1": 0}
    assert [planned.verdict for planned in plan.order] == [Outcome.MAY_FIT]
