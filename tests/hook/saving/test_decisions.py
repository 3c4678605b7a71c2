"""Pure decisions of the hook: when to save, which files are missing, when a run is finished."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_hook.contract import check_id
from trainer_hook.libraries.transformers.checkpoint_files import WEIGHTS_OF_TRAINER, is_finished, missing_from
from trainer_hook.libraries.transformers.trainer import _is_search
from trainer_hook.process.rank_consensus import (
    INTERVAL_MS,
    MAX_TICKS,
    RankConsensus,
    Vote,
    new_attempt,
    next_check,
    place_among,
    place_in_blocks,
)
from trainer_hook.saving.schedule import Schedule, surplus
from trainer_hook.saving.step_monitor import stop_reason

ALONE = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


def missing(files: set[str], *, rank: int = 0, world_size: int = 1, saved_world_size: int | None = None) -> list[str]:
    return missing_from(files, rank=rank, world_size=world_size, saved_world_size=saved_world_size)


@pytest.mark.parametrize("lost", ALONE)
def test_any_single_missing_file_is_named(lost: str) -> None:
    [named] = missing(set(ALONE) - {lost})
    assert named == ("the model's weights" if lost == "model.safetensors" else lost)


@given(st.sets(st.sampled_from(ALONE)), st.sets(st.sampled_from(["README.md", "training_args.bin", "config.json", "x/model"])))
def test_as_many_names_as_files_are_missing_and_other_files_do_not_matter(lost: set[str], more: set[str]) -> None:
    assert len(missing((set(ALONE) - lost) | more)) == len(lost)


@given(st.integers(2, 64), st.data())
def test_each_rank_needs_its_own_random_state(world_size: int, data: st.DataObject) -> None:
    rank, lost = data.draw(st.integers(0, world_size - 1)), data.draw(st.integers(0, world_size - 1))
    files = {*ALONE[:3], ALONE[4], *(f"rng_state_{other}.pth" for other in range(world_size) if other != lost)}
    found = missing(files, rank=rank, world_size=world_size)
    assert found == ([f"rng_state_{rank}.pth"] if rank == lost else [])


def test_after_a_change_of_the_world_size_the_random_state_is_not_asked_for() -> None:
    files = {*ALONE[:3], ALONE[4], "rng_state_0.pth", "rng_state_1.pth"}
    assert missing(files, rank=0, world_size=1, saved_world_size=2) == []
    assert missing(files, rank=2, world_size=3, saved_world_size=2) == []
    assert missing(files, rank=2, world_size=3, saved_world_size=3) == ["rng_state_2.pth"]


@pytest.mark.parametrize(
    "weights",
    [
        "0_Transformer/model.safetensors",
        "query_0_StaticEmbedding/model.safetensors",
        "2_Dense/pytorch_model.bin",
        "pytorch_model_fsdp.bin",
        "pytorch_model.bin",
        "model-00001-of-00002.safetensors",
        "adapter_model.safetensors",
        "train/adapter_model.safetensors",
        "train/adapter_model.bin",
        "pytorch_model_fsdp_0/x",
    ],
)
def test_weights_have_many_names(weights: str) -> None:
    assert missing({*ALONE[1:], weights}) == []


@pytest.mark.parametrize(
    "name",
    [
        "model_args.json",
        "model_card.md",
        "modeling_custom.py",
        "model.safetensors.index.json",
        "model",
        "optimizer_args.json",
        "global_step7",
        "vision/model_card.md",
    ],
)
def test_a_file_whose_name_only_begins_like_theirs_is_neither_weights_nor_optimizer(name: str) -> None:
    assert missing({*ALONE[2:], name}) == ["the model's weights", "optimizer.pt"]


@pytest.mark.parametrize(("path", "is_loaded"), [("vision/model.safetensors", False), ("train/adapter_model.bin", True)])
def test_trainers_own_loader_takes_no_weights_from_folders_but_adapters(path: str, is_loaded: bool) -> None:
    found = missing_from(
        dict.fromkeys((*ALONE[1:], path), 1), rank=0, world_size=1, saved_world_size=1, weights=WEIGHTS_OF_TRAINER
    )
    assert found == ([] if is_loaded else ["the model's weights"])


def test_the_names_are_those_of_the_libraries() -> None:
    from transformers import utils

    names = (utils.WEIGHTS_NAME, utils.SAFE_WEIGHTS_NAME, utils.ADAPTER_WEIGHTS_NAME, utils.ADAPTER_SAFE_WEIGHTS_NAME)
    assert all(map(WEIGHTS_OF_TRAINER.fullmatch, names))


def test_deepspeed_keeps_weights_and_optimizer_in_a_folder_of_its_own() -> None:
    files = {"global_step7/mp_rank_00_model_states.pt", "trainer_state.json", "rng_state_0.pth"}
    assert missing(files, rank=0, world_size=2) == []
    assert missing(files - {"rng_state_0.pth"}, rank=0, world_size=2) == ["rng_state_0.pth"]


@given(st.integers(0, 1000), st.integers(1, 1000))
def test_a_run_with_a_step_limit_is_over_at_that_step(step: int, limit: int) -> None:
    assert is_finished({"global_step": step, "epoch": 99.0}, {}, max_steps=limit, epochs=3) == (step >= limit)


@pytest.mark.parametrize(
    ("epoch", "epochs", "over"),
    [(2.0, 2, True), (1.9999999999, 2, True), (1.99, 2, False), (0.5, 0.5, True), (None, 1, False), (1.5, 1.5, True)],
)
def test_a_run_with_an_epoch_limit_is_over_at_its_end(epoch: float | None, epochs: float, over: bool) -> None:
    assert is_finished({"global_step": 10, "epoch": epoch}, {}, max_steps=-1, epochs=epochs) is over


def test_a_run_that_was_stopped_early_is_over() -> None:
    assert is_finished({"global_step": 3}, {"stopped_early": True}, max_steps=10, epochs=3)
    assert not is_finished({}, {}, max_steps=10, epochs=3)


@given(st.integers(0, 10**6), st.integers(1, 1000))
def test_steps_are_due_at_their_multiples_and_never_at_none(step: int, every: int) -> None:
    assert Schedule("steps", every, 60).due_at_step(step) == (step > 0 and step % every == 0)


@pytest.mark.parametrize("strategy", ["steps", "epoch", "minutes", "no"])
def test_each_strategy_looks_at_one_thing_alone(strategy: str) -> None:
    schedule = Schedule(strategy, 5, 60.0)
    assert schedule.due_at_step(10) == (strategy == "steps")
    assert schedule.due_at_epoch_end() == (strategy == "epoch")
    assert schedule.due_at_time(since_save_s=60.0) == (strategy == "minutes")
    assert not schedule.due_at_time(since_save_s=59.9)


steps_saved = st.dictionaries(st.integers(0, 100), st.sampled_from(["a", "b", None]))


@given(steps_saved, st.integers(1, 10), st.integers(0, 100), st.none() | st.integers(0, 100))
def test_surplus_leaves_the_saved_step_and_the_limit(
    saves: dict[int, str | None], limit: int, step: int, resumed_step: int | None
) -> None:
    saves = saves | {step: "a"}
    gone = surplus(saves, limit=limit, step=step, attempt="a", resumed_step=resumed_step)
    assert step not in gone
    assert len(set(gone)) == len(gone) == max(0, len(saves) - limit)
    assert surplus(saves, limit=None, step=step, attempt="a", resumed_step=resumed_step) == []


@given(st.sets(st.integers(0, 100), min_size=1), st.integers(1, 10))
def test_surplus_of_one_attempt_leaves_the_newest(steps: set[int], limit: int) -> None:
    gone = surplus(dict.fromkeys(steps, "a"), limit=limit, step=max(steps), attempt="a", resumed_step=None)
    assert gone == sorted(steps)[:-limit]


@pytest.mark.parametrize("attempt", ["before", "now"])
def test_abandoned_steps_go_before_the_one_that_training_resumed_from(attempt: str) -> None:
    """A trainer that starts again in its pod goes on in the same attempt."""
    saves: dict[int, str | None] = {100: "before", 200: attempt, 300: attempt, 143: "now"}
    gone = [surplus(saves, limit=limit, step=143, attempt="now", resumed_step=100) for limit in (3, 2, 1)]
    assert gone == [[200], [200, 300], [200, 300, 100]]


@given(st.integers(0, 10**9), st.floats(0, 1e9))
def test_ranks_talk_again_after_one_tick_at_least_and_about_a_second(tick: int, ms: float) -> None:
    ahead = next_check(tick, ms_per_tick=ms) - tick
    assert 1 <= ahead <= MAX_TICKS
    assert ahead == 1 or ahead * ms <= INTERVAL_MS + 1e-6


def test_alone_every_wish_is_granted_at_once() -> None:
    consensus = RankConsensus()
    assert (consensus.world.local_rank, consensus.world.local_size) == (0, 1)
    assert consensus.tick("train", lambda: Vote(stop=True)) == Vote(stop=True)
    assert consensus.all_agree(True)
    assert not consensus.all_agree(False)
    assert consensus.from_rank_0("x") == "x"


@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=12), st.data())
def test_a_ranks_place_is_counted_among_those_of_its_host(names: list[str], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(names) - 1))
    world = place_among(names, rank)
    assert (world.rank, world.size) == (rank, len(names))
    assert world.local_size == names.count(names[rank])
    assert world.local_rank == names[:rank].count(names[rank])
    everybody = [place_among(names, other) for other in range(len(names))]
    assert {other.node for other in everybody} == set(range(world.nodes))
    assert {other.rank for other in everybody if other.node == world.node} == set(world.ranks)


@given(nodes=st.integers(1, 5), local_size=st.integers(1, 5))
def test_torchruns_nodes_are_those_that_host_names_would_tell(nodes: int, local_size: int) -> None:
    names = [f"host-{node}" for node in range(nodes) for _ in range(local_size)]
    for rank in range(len(names)):
        place = place_in_blocks(rank, len(names), local_rank=rank % local_size, local_size=local_size)
        assert place == place_among(names, rank)


def test_ranks_that_mpirun_deals_out_one_by_one_are_on_the_node_of_their_host() -> None:
    places = [place_among(["a", "b", "a", "b"], rank) for rank in range(4)]
    assert [(place.node, place.nodes, place.local_rank) for place in places] == [(0, 2, 0), (1, 2, 0), (0, 2, 1), (1, 2, 1)]


def test_attempts_are_ids_that_sort_by_time() -> None:
    first, second = new_attempt(), new_attempt()
    assert check_id(first, what="attempt") == first != second
    assert first[:16] <= second[:16]


@pytest.mark.parametrize(
    ("args", "kwargs", "search"),
    [
        ((), {}, False),
        ((None,), {}, False),
        (({"lr": 1},), {}, True),
        ((), {"trial": {"lr": 1}}, True),
        ((), {"trial": None}, False),
    ],
)
def test_a_trial_of_a_hyperparameter_search_is_left_alone(args: tuple[Any, ...], kwargs: dict[str, Any], search: bool) -> None:
    assert _is_search(args, kwargs) is search


@pytest.mark.parametrize("threads", [1, 2])
def test_a_call_in_an_objective_of_optuna_is_a_trial(threads: int) -> None:
    optuna = pytest.importorskip("optuna")
    found: list[bool] = []

    def objective(trial: Any) -> float:
        found.append(_is_search((), {}))
        return float(trial.number)

    optuna.create_study().optimize(objective, n_trials=2, n_jobs=threads)
    assert found == [True, True]
    assert not _is_search((), {})


def test_a_rank_says_whose_notice_it_follows() -> None:
    assert stop_reason(has_notice=True, is_preempted=True) == "termination notice"
    assert stop_reason(has_notice=False, is_preempted=True) == "termination notice of another rank"
    assert stop_reason(has_notice=False, is_preempted=False) == "request to stop"
