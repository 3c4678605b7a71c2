"""The outcome of a run that finished in an earlier pod."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer_hook.libraries.transformers import finished
from trainer_hook.libraries.transformers.finished import hand_over, training_outcome
from trainer_hook.resuming.resumer import Choice

AT_END = {"train_runtime": 7.0, "train_loss": 0.25, "total_flos": 9.0, "epoch": 2.0, "step": 8}


def test_the_outcome_is_what_the_trainer_logged_at_its_end() -> None:
    history = [{"loss": 0.5, "step": 4}, AT_END, {"eval_loss": 1.0, "step": 8}]
    assert training_outcome({"log_history": history}) == (0.25, {n: v for n, v in AT_END.items() if n != "step"})


def test_of_a_state_from_before_the_end_the_logged_losses_stand_in() -> None:
    history = [{"loss": 0.5, "step": 4}, {"eval_loss": 1.0}, {"loss": 0.25, "step": 8}, {"loss": "NaN"}]
    loss, metrics = training_outcome({"log_history": history, "epoch": 2.0, "total_flos": 9.0})
    assert (loss, metrics["train_loss"], metrics["epoch"], metrics["total_flos"]) == (0.375, 0.375, 2.0, 9.0)
    assert {"train_runtime", "train_samples_per_second", "train_steps_per_second"} < metrics.keys()


@pytest.mark.parametrize("state", [{}, {"log_history": None}, {"log_history": [None, 3, "x"]}])
def test_a_state_that_says_nothing_gives_an_outcome_all_the_same(state: dict[str, Any]) -> None:
    assert training_outcome(state)[0] == 0.0


def test_callbacks_have_their_states_of_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second train() of the trainer began with callbacks that had seen nothing; those of final/ are of the start."""
    (tmp_path / "trainer_state.json").write_text(json.dumps({"stateful_callbacks": {"Budget": {"args": {"used": 9}}}}))
    restored: list[Any] = []
    state: Any = SimpleNamespace(stateful_callbacks={"Budget": {"args": {"used": 0}}})
    trainer: Any = SimpleNamespace(state=state, callback_handler=SimpleNamespace(callbacks=[]), _load_rng_state=lambda _: None)
    trainer._load_callback_state = lambda: restored.append(dict(state.stateful_callbacks))
    monkeypatch.setattr(finished, "_load_optimizer", lambda *_: None)
    resumer: Any = None
    hand_over(trainer, Choice("checkpoint-9", tmp_path, {}), resumer)
    assert restored == [{"Budget": {"args": {"used": 9}}}]
