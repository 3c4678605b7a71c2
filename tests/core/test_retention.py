from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.retention import Kept, plan_local_deletion, plan_store_deletion


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


@given(kept(), counts, strides)
def test_the_store_never_loses_the_newest_nor_the_protected_nor_final(
    committed: list[Kept], keep_newest: int, keep_every_steps: int | None
) -> None:
    plan = plan_store_deletion(committed, keep_newest=keep_newest, keep_every_steps=keep_every_steps)
    assert not {deletion.name for deletion in plan} & untouchable(committed)
    assert all(deletion.reason for deletion in plan)


@given(kept(), counts, strides)
def test_the_store_keeps_the_newest_and_the_steps_of_the_stride_and_nothing_else(
    committed: list[Kept], keep_newest: int, keep_every_steps: int | None
) -> None:
    gone = {d.name for d in plan_store_deletion(committed, keep_newest=keep_newest, keep_every_steps=keep_every_steps)}
    for checkpoint in committed:
        if checkpoint.step is None or checkpoint.protected:
            continue
        newer = sum(other.step is not None and other.step > checkpoint.step for other in committed)
        stays = newer < keep_newest or (keep_every_steps is not None and checkpoint.step % keep_every_steps == 0)
        assert (checkpoint.name in gone) == (not stays)


@given(kept(), counts, strides)
def test_the_store_loses_the_oldest_first_and_no_checkpoint_twice(
    committed: list[Kept], keep_newest: int, keep_every_steps: int | None
) -> None:
    plan = plan_store_deletion(committed, keep_newest=keep_newest, keep_every_steps=keep_every_steps)
    steps = [int(deletion.name.removeprefix("checkpoint-")) for deletion in plan]
    assert steps == sorted(set(steps))


@given(kept(), counts, strides)
def test_after_a_plan_was_carried_out_nothing_is_left_to_delete(
    committed: list[Kept], keep_newest: int, keep_every_steps: int | None
) -> None:
    gone = {d.name for d in plan_store_deletion(committed, keep_newest=keep_newest, keep_every_steps=keep_every_steps)}
    left = [c for c in committed if c.name not in gone]
    assert plan_store_deletion(left, keep_newest=keep_newest, keep_every_steps=keep_every_steps) == []


@given(kept(), strides)
def test_without_a_limit_the_store_keeps_everything(committed: list[Kept], keep_every_steps: int | None) -> None:
    assert plan_store_deletion(committed, keep_newest=None, keep_every_steps=keep_every_steps) == []


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


def test_the_two_newest_of_four_stay() -> None:
    durable = [Kept(f"checkpoint-{step}", step) for step in (10, 40, 20, 30)]
    plan = plan_store_deletion(durable, keep_newest=2, keep_every_steps=None)
    assert [(d.name, d.reason) for d in plan] == [
        ("checkpoint-10", "2 newer are committed"),
        ("checkpoint-20", "2 newer are committed"),
    ]


def test_every_hundredth_step_stays_for_ever() -> None:
    committed = [Kept(f"checkpoint-{step}", step) for step in range(0, 301, 50)]
    plan = plan_store_deletion(committed, keep_newest=1, keep_every_steps=100)
    assert [d.name for d in plan] == ["checkpoint-50", "checkpoint-150", "checkpoint-250"]


def test_a_short_disk_takes_the_oldest_of_the_kept_first_and_leaves_the_newest() -> None:
    durable = [Kept(f"checkpoint-{step}", step, size_bytes=10) for step in (10, 20, 30)]
    one = plan_local_deletion(durable, keep_newest=3, free_bytes=0, min_free_bytes=5)
    assert [d.name for d in one] == ["checkpoint-10"]
    all_but_newest = plan_local_deletion(durable, keep_newest=3, free_bytes=0, min_free_bytes=1000)
    assert [d.name for d in all_but_newest] == ["checkpoint-10", "checkpoint-20"]
    assert "less than 1000 bytes" in all_but_newest[0].reason


def test_a_disk_with_exactly_the_space_asked_for_is_not_short() -> None:
    durable = [Kept(f"checkpoint-{step}", step, size_bytes=10) for step in (10, 20)]
    assert plan_local_deletion(durable, keep_newest=2, free_bytes=5, min_free_bytes=5) == []
