"""What a loader draws when an epoch begins is the same after a resume: its order, and the training that follows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hook.conftest import pod
from tests.hook.job import Training, finished, script, training
from tests.marks import slow

LOADERS: dict[str, dict[str, Any]] = {
    "global": {"own_loader": "global"},
    "generator": {"own_loader": "generator"},
    "batches": {"own_loader": "batches"},
    "stream": {"stream": True},
    "callback": {"epoch_draws": True},
    "workers": {"args": {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}},
}
PER_EPOCH = 16


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOADERS)
def test_a_resumed_epoch_begins_as_the_interrupted_one(kind: str, tmp_path: Path, unhooked: Callable[..., str]) -> None:
    """Rows of the interrupted epoch were seen twice, and others never; new workers drew from the random state of training."""
    told = LOADERS[kind] | {"args": {"max_steps": 40} | LOADERS[kind].get("args", {})}
    store = tmp_path / "store"

    def interrupted(volume: Path, step: int, end: Callable[[Training], Any]) -> None:
        slowly = script(**told, sleep_s=0.1)
        with pod(volume, store) as (sidecar, found), training(slowly, volume, found | {"CKPT_SAVE_STEPS": "16"}) as running:
            running.at_step(step)
            end(running)
            sidecar.committed(finished(volume)[-1])
            assert sidecar.terminate() == 0

    interrupted(tmp_path / "first", PER_EPOCH + 2, Training.close)  # resumed between two epochs
    interrupted(tmp_path / "second", PER_EPOCH + 5, Training.terminate)  # and in the middle of one
    with pod(tmp_path / "third", store) as (_, found), training(script(**told), tmp_path / "third", found) as last:
        assert last.wait() == 0, last.log()
    assert PER_EPOCH + 5 < last.steps()[0] < 2 * PER_EPOCH, last.log()
    assert kind == "workers" or "not bit-identical" not in last.log()
    assert f"weights {last.weights()}" in unhooked(**told)


WORKERS = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
ENDS: dict[str, tuple[dict[str, Any], dict[str, str], int]] = {
    "evaluation": ({"stream": True, "args": {"eval_strategy": "epoch"}}, {"CKPT_SAVE_STRATEGY": "epoch"}, PER_EPOCH + 1),
    "workers": ({"stream": "same", "args": WORKERS}, {"CKPT_SAVE_STEPS": "6"}, 7),
    "callback": ({"ends_epoch_at": 7}, {"CKPT_SAVE_STEPS": "7"}, 8),
    "counted": ({"ends_epoch_at": 7}, {"CKPT_SAVE_STEPS": "18"}, 19),
    "evaluations": ({"args": WORKERS | {"eval_strategy": "steps", "eval_steps": 4}}, {"CKPT_SAVE_STEPS": "6"}, 7),
    "later": ({"ends_epoch_at": 7}, {"CKPT_SAVE_STEPS": "12"}, 13),
}


@pytest.mark.parametrize("kind", ["evaluation", *slow(*list(ENDS)[1:])])
def test_an_epoch_whose_end_the_count_of_epochs_does_not_tell(kind: str, tmp_path: Path, unhooked: Callable[..., str]) -> None:
    """It was evaluated twice; new workers drew from training's random state; the rest of it was trained after all."""
    told, settings, killed_at = ENDS[kind]
    told = told | {"args": {"max_steps": 24} | told.get("args", {})}
    with (
        pod(tmp_path / "first", tmp_path / "store") as (sidecar, found),
        training(script(**told, sleep_s=0.1), tmp_path / "first", found | settings) as first,
    ):
        first.at_step(killed_at)
        first.close()
        sidecar.committed(finished(tmp_path / "first")[-1])
    with (
        pod(tmp_path / "second", tmp_path / "store") as (_, found),
        training(script(**told), tmp_path / "second", found | settings) as second,
    ):
        assert second.wait() == 0, second.log()
    assert 1 < second.steps()[0] <= killed_at
    assert finished(tmp_path / "second")[-1] == f"checkpoint-{second.steps()[-1]}", "the last step, wherever it is"
    assert f"weights {second.weights()}" in unhooked(**told)
