"""SIGTERM during an evaluation: the save does not wait, and the resumed run repeats the evaluation, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.hook.job import Answers, finished, marker, script, training
from tests.hook.train_call.test_scripts import ready
from trainer_hook.libraries.transformers.step_tail import EPOCH_END, EVALUATE, SAVE, STOP, StepTail, unfinished_of

ARGUMENTS = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4, "max_steps": 8}
TOLD: dict[str, Any] = {"args": ARGUMENTS, "rows": 16, "eval_draws": True}
"""Each 4th step is evaluated and saved by the script, and ends an epoch; evaluation draws random numbers."""


def evaluated_and_saved(log: str) -> list[str]:
    return re.findall(r"^(?:evaluated|script saved) \d+$", log, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "step", "left"),
    [
        ("prediction step\n", 4, [EVALUATE, SAVE, EPOCH_END]),
        ("rank 0 step 8\n", 8, [EVALUATE, SAVE, EPOCH_END, STOP]),
    ],
    ids=["inside an evaluation", "at the last step of all"],
)
def test_what_an_interrupted_step_has_left_is_done_first(
    at: str, step: int, left: list[str], volume: Path, answers: Answers, unhooked: Callable[..., str]
) -> None:
    name = f"checkpoint-{step}"
    with training(script(**TOLD, sleep_s=0.3, eval_sleep_s=0.3), volume, answers.settings) as first:
        first.said(at)
        assert first.terminate() == 143, first.log()
        assert f"evaluated {step}" not in first.log(), "an evaluation is not waited for"
        assert (finished(volume)[-1], marker(volume, name)["reason"]) == (name, "jit")
        assert marker(volume, name)["meta"]["unfinished"] == left
    offer = ready(name, **marker(volume, name)["meta"])
    answers.by_call["POST /v1/resume"] = lambda asked: (
        offer(asked) if asked["checkpoint"] != "final" else (202, {"state": "none"})
    )
    with training(script(**TOLD), volume, answers.settings) as second:
        assert second.wait() == 0, second.log()
        assert f"does first what {name} left unfinished: {', '.join(left)}" in second.log()
        assert second.steps() == list(range(step + 1, 9))
        alone = unhooked(**TOLD)
        assert f"weights {second.weights()}" in alone
        assert re.findall(r"^draws .*", second.log(), re.MULTILINE) == re.findall(r"^draws .*", alone, re.MULTILINE)
        assert evaluated_and_saved(first.log()) + evaluated_and_saved(second.log()) == evaluated_and_saved(alone)


@pytest.mark.slow
def test_an_evaluation_with_averaged_weights_is_waited_for(
    volume: Path, answers: Answers, unhooked: Callable[..., str]
) -> None:
    told = {**TOLD, "averages": True}
    with training(script(**told, eval_sleep_s=0.3), volume, answers.settings) as first:
        first.said("prediction step\n")
        assert first.terminate() == 143, first.log()
        assert "evaluated 4" in first.log()
        assert finished(volume) == ["checkpoint-5"], "the end of the next step"
    answers.by_call["POST /v1/resume"] = ready("checkpoint-5", **marker(volume, "checkpoint-5")["meta"])
    with training(script(**told), volume, answers.settings) as second:
        assert second.wait() == 0, second.log()
        assert second.steps() == [6, 7, 8]
        assert f"weights {second.weights()}" in unhooked(**told)


def tail(**control: Any) -> StepTail:
    asked = {"should_evaluate": False, "should_save": False, "should_training_stop": False, "should_epoch_stop": False}
    state = SimpleNamespace(epoch=control.pop("epoch", 0.5))
    args, model = SimpleNamespace(world_size=1), SimpleNamespace(parameters=list)
    control_of = SimpleNamespace(**asked | control)
    return StepTail(SimpleNamespace(control=control_of, state=state, args=args, model=model, optimizer=None))


@pytest.mark.parametrize(
    ("control", "left"),
    [
        ({}, ()),
        ({"should_evaluate": True}, (EVALUATE,)),
        ({"should_save": True, "epoch": 2.0}, (SAVE, EPOCH_END)),
        ({"should_epoch_stop": True}, (EPOCH_END,)),
        ({"should_evaluate": True, "should_training_stop": True}, (EVALUATE, EPOCH_END, STOP)),
    ],
)
def test_what_a_step_has_left_is_what_the_trainer_was_told_to_do(control: dict[str, Any], left: tuple[str, ...]) -> None:
    one = tail(**control)
    assert one.unfinished == ()
    one.step_ends(one._trainer.control)
    assert one.unfinished == left
    one.step_begins()
    assert one.unfinished == ()


def test_an_evaluation_on_several_datasets_is_left_until_the_last_one() -> None:
    one = tail(should_evaluate=True, should_save=True)
    one.step_ends(one._trainer.control)
    with one.doing():
        one._trainer.control.should_evaluate = False  # what the library does after the first dataset
        assert one.unfinished == (EVALUATE, SAVE)
    one._trainer.control.should_save = False
    assert one.unfinished == ()


def test_the_end_of_an_epoch_is_left_until_it_was_handled() -> None:
    one = tail(epoch=1.0)
    one.step_ends(one._trainer.control)
    assert one.is_epoch_end_due
    one.epoch_ends(one._trainer.control)
    assert not one.is_epoch_end_due
    one.done()
    assert one.unfinished == ()


@pytest.mark.parametrize("meta", [{}, {"unfinished": None}, {"unfinished": "evaluate"}, {"unfinished": ["later"]}])
def test_a_marker_that_says_nothing_known_leaves_nothing(meta: dict[str, Any]) -> None:
    assert unfinished_of(meta) == ()


def test_an_evaluation_that_an_error_ends_is_still_left() -> None:
    one = tail(should_evaluate=True)
    one.step_ends(one._trainer.control)
    with pytest.raises(RuntimeError, match="DataLoader worker"), one.doing():
        raise RuntimeError("DataLoader worker (pid 5) is killed by signal: Terminated")
    assert one.unfinished == (EVALUATE,)
    one.step_begins()
    assert not one.is_doing


def test_a_control_that_a_callback_put_in_place_of_the_trainers_counts() -> None:
    one = tail()
    one.step_ends(SimpleNamespace(**vars(one._trainer.control) | {"should_evaluate": True}))
    assert one.unfinished == (EVALUATE,)
