"""The log says why a resume is not exact, and only then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer_hook.libraries.transformers.checkpoint_files import STATE, missing_from
from trainer_hook.libraries.transformers.exactness import known_reasons, reported
from trainer_hook.process.client import Client
from trainer_hook.process.rank_consensus import World
from trainer_hook.process.settings import Settings
from trainer_hook.resuming.resumer import Resumer


class EarlyStoppingCallback:
    """Named as the library's own."""


class SyncRefModelCallback:
    """Named as TRL's own."""


class BEMACallback:
    """Named as TRL's own."""


def trainer(fetch: Callable[[], Any] = list, **arguments: Any) -> Any:
    given = {"ignore_data_skip": False, "restore_callback_states_from_checkpoint": False, "dataloader_num_workers": 0}
    return SimpleNamespace(
        args=SimpleNamespace(**given | arguments),
        callback_handler=SimpleNamespace(callbacks=arguments.get("callbacks", [])),
        train_dataset=arguments.get("train_dataset"),
        get_batch_samples=fetch,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"ignore_data_skip": True}, "ignore_data_skip"),
        ({"dataloader_num_workers": 2}, "worker processes"),
        ({"callbacks": [EarlyStoppingCallback()]}, "EarlyStoppingCallback forgets"),
        ({"callbacks": [BEMACallback()]}, "BEMACallback keeps beside the trained one"),
        ({"dataloader_persistent_workers": True, "train_dataset": SimpleNamespace(set_epoch=int)}, "from the second pass on"),
    ],
)
def test_what_the_arguments_tell_is_said(arguments: dict[str, Any], said: str) -> None:
    [reason] = known_reasons(trainer(**arguments), 7)
    assert said in reason


@pytest.mark.parametrize(("step", "is_said"), [(7, True), (8, False)])
def test_completions_that_serve_several_steps_are_exact_only_between_them(step: int, is_said: bool) -> None:
    one = trainer(steps_per_generation=2, gradient_accumulation_steps=1)
    one.num_iterations, one._buffered_inputs = 2, None
    assert bool(known_reasons(one, step)) == is_said


@pytest.mark.parametrize(("step", "is_said"), [(3, False), (4, True), (5, True)])
def test_a_reference_model_that_follows_training_is_not_in_a_checkpoint(step: int, is_said: bool) -> None:
    reasons = known_reasons(trainer(callbacks=[SyncRefModelCallback()], ref_model_sync_steps=4), step)
    assert ["SyncRefModelCallback" in reason for reason in reasons] == [True] * is_said


def test_callbacks_that_are_restored_forget_nothing() -> None:
    callbacks = [EarlyStoppingCallback()]
    assert known_reasons(trainer(restore_callback_states_from_checkpoint=True, callbacks=callbacks), 7) == []


def draws_torch() -> None:
    import torch

    torch.rand(1)


def draws_numpy() -> None:
    import numpy as np

    np.random.rand()


def draws_python() -> None:
    import random

    random.random()


@pytest.mark.parametrize(("fetch", "is_said"), [(list, False), (draws_torch, True), (draws_numpy, True), (draws_python, True)])
def test_batches_that_draw_random_numbers_are_found_out(fetch: Any, is_said: bool, capsys: pytest.CaptureFixture[str]) -> None:
    one = type("Trainer", (), {"get_batch_samples": lambda self: fetch()})()
    vars(one).update(vars(trainer()), get_batch_samples=None)
    del one.get_batch_samples
    with reported(one, 7):
        one.get_batch_samples()
        assert capsys.readouterr().err == "", "the first fetch of a pass also shuffles"
        for _ in range(3):
            one.get_batch_samples()
    assert capsys.readouterr().err.count("this resume is not bit-identical: the dataset or its collator draws") == is_said
    assert "get_batch_samples" not in vars(one)


def test_a_pass_that_begins_after_one_batch_may_shuffle(capsys: pytest.CaptureFixture[str]) -> None:
    """A run that resumed before the last batch of an epoch was said to be inexact."""
    seen: list[object] = []

    class Trainer:
        def get_batch_samples(self, epoch_iterator: object, _: int) -> None:
            if epoch_iterator not in seen:
                draws_torch()
            seen.append(epoch_iterator)

    one: Any = Trainer()
    vars(one).update(vars(trainer()))
    del one.get_batch_samples
    with reported(one, 15):
        for epoch in ("first", "second", "second", "second"):
            one.get_batch_samples(epoch, 1)
    assert capsys.readouterr().err == ""


def test_what_was_saved_with_save_only_model_is_no_checkpoint_to_resume_from(tmp_path: Path) -> None:
    alone: Any = SimpleNamespace(world=World(), all_agree=bool)
    resumer = Resumer(Settings(dir=tmp_path), Client("http://127.0.0.1:1", tmp_path), alone, missing=missing_from)
    folder = tmp_path / "checkpoint-7"
    folder.mkdir()
    assert all(STATE in resumer.lacks(each) for each in (tmp_path / "nowhere", folder))
    for name in ("model.safetensors", "trainer_state.json"):
        (folder / name).write_bytes(b"{}")
    assert resumer.lacks(folder) == ["optimizer.pt", "scheduler.pt"]
    (folder / ".complete").touch()
    assert "save_only_model" in (resumer._incomplete(folder) or "")
