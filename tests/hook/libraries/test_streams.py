"""Where in the data a run continues: by the count of epochs that Trainer saved, and by what the marker says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.hook.libraries.test_evaluation import tail
from trainer_hook.libraries.transformers.streams import has_same_epochs, pass_continued, position, position_in_epochs
from trainer_hook.resuming.resumer import Choice


def args(**given: Any) -> Any:
    return SimpleNamespace(**{"ignore_data_skip": False, "max_steps": 40, "gradient_accumulation_steps": 2} | given)


@pytest.mark.parametrize(
    ("epoch", "has_ended", "found"),
    [
        (None, False, None),
        (0.25, False, None),
        (0.25, True, (1, 0)),
        (1.25, False, (1, 20)),
        (1.25, True, (2, 0)),
        (2.0, False, (2, 0)),
    ],
)
def test_a_dataset_without_a_length_is_continued_by_passes(epoch: float | None, has_ended: bool, found: Any) -> None:
    state = {"epoch": epoch, "max_steps": 40}
    assert position(state, args(), has_ended=has_ended) == found
    assert position(state, args(ignore_data_skip=True), has_ended=has_ended) is None


@pytest.mark.parametrize(
    ("steps", "batches"), [(steps, batches) for steps in (1, 2, 3, 6) for batches in (2 * steps - 1, 2 * steps)]
)
def test_the_epoch_and_its_batches_are_those_of_the_count_of_epochs(steps: int, batches: int) -> None:
    """Also where an earlier epoch was ended early, by whatever number of steps."""
    for step in range(1, steps):
        state = {"epoch": 3 + 2 * step / batches}
        assert position_in_epochs(state, args(), steps=steps, has_ended=False) == (3, 2 * step)
        assert position_in_epochs(state, args(), steps=steps, has_ended=True) == (4, 0)
    assert position_in_epochs({"epoch": 3.0}, args(), steps=steps, has_ended=False) == (3, 0)


@pytest.mark.parametrize(
    ("max_steps", "epochs", "is_same"),
    [(150, 3, True), (250, 5, True), (75, 3, False), (300, 3, False), (150, 6, False)],
)
def test_epochs_of_another_number_of_steps_are_told(max_steps: int, epochs: int, is_same: bool) -> None:
    """With half the ranks an epoch has twice the steps: counted in epochs, the run would end before its last step."""
    state = {"epoch": 1.2, "max_steps": 150, "num_train_epochs": 3}
    assert has_same_epochs(state, max_steps=max_steps, epochs=epochs) == is_same
    assert not has_same_epochs({"epoch": 1.2}, max_steps=max_steps, epochs=epochs)


class Resuming:
    """The part of Trainer that finds the position: by the finished steps alone."""

    def __init__(self) -> None:
        self.args = args(max_steps=-1, gradient_accumulation_steps=1)

    def _init_training_state(self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int) -> tuple[int, int]:
        return divmod(12, num_update_steps_per_epoch)


@pytest.mark.parametrize(("steps", "found"), [(10, (1, 2)), (20, (0, 12))])
def test_with_another_batch_size_trainer_decides_where_to_continue(steps: int, found: tuple[int, int], tmp_path: Path) -> None:
    """Otherwise the epochs would be over before the last step: at step 48 of 60."""
    state = {"epoch": 1.2, "global_step": 12, "max_steps": 30, "num_train_epochs": 3}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    trainer = Resuming()
    with pass_continued(trainer, Choice("checkpoint-12", tmp_path, {})):
        assert trainer._init_training_state(3 * steps, steps, 3) == found


class Resuming4:
    """As ``Resuming``, before transformers 5: from the state, once it has told the callbacks theirs."""

    def __init__(self, state: Any, steps: int, **told: Any) -> None:
        self.args, self.state, self._steps = args(num_train_epochs=3, **told), SimpleNamespace(**state), steps

    def _load_callback_state(self) -> None: ...

    def position(self) -> tuple[int, int]:
        self._load_callback_state()
        epoch = int(self.state.global_step // self._steps)
        skipped = self.state.global_step % self._steps * self.args.gradient_accumulation_steps
        assert type(self.state.global_step) is int
        return epoch, skipped


UNSIZED, SIZED = {"max_steps": 40, "num_train_epochs": sys.maxsize}, {"max_steps": 30, "num_train_epochs": 3}
LAST = (sys.maxsize, 0)


@pytest.mark.parametrize(
    ("state", "meta", "told", "steps", "found"),
    [
        (UNSIZED | {"epoch": 1.25, "global_step": 26}, {}, {}, 40, (1, 20)),
        (UNSIZED | {"epoch": 0.4, "global_step": 16}, {"epoch_ended": True}, {}, 40, (1, 0)),
        (UNSIZED | {"epoch": 0.4, "global_step": 16}, {}, {}, 40, (0, 32)),
        (UNSIZED | {"epoch": 0.4, "global_step": 16}, {"unfinished": ["stop"]}, {}, 40, LAST),
        (SIZED | {"epoch": 1.2, "global_step": 12}, {}, {"max_steps": -1}, 10, (1, 4)),
        (SIZED | {"epoch": 1.2, "global_step": 7}, {}, {"max_steps": -1}, 10, (1, 4)),
        (SIZED | {"epoch": 0.7, "global_step": 7}, {"epoch_ended": True}, {"max_steps": -1}, 10, (1, 0)),
        (SIZED | {"epoch": 1.2, "global_step": 12}, {}, {"max_steps": -1}, 20, (0, 24)),
        (SIZED | {"epoch": 2.8, "global_step": 28}, {}, {"max_steps": 28}, 10, LAST),
        (SIZED | {"epoch": 0.9, "global_step": 3}, {}, {"max_steps": -1}, 3, (1, 0)),
    ],
)
def test_before_transformers_5_the_position_is_told_with_the_count_of_steps(
    state: Any, meta: Any, told: Any, steps: int, found: tuple[int, int], tmp_path: Path
) -> None:
    """Training ended as finished where the first pass has fewer batches than were skipped, or trained one step too many."""
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    trainer = Resuming4(state, steps, **told)
    with pass_continued(trainer, Choice("checkpoint", tmp_path, meta)):
        assert trainer.position() == found


def test_only_an_end_that_the_count_of_epochs_does_not_tell_is_in_the_marker() -> None:
    for control, is_told in [({"epoch": 0.75}, True), ({"epoch": 1.0}, False), ({"should_training_stop": True}, False)]:
        one = tail(**control)
        one.step_ends(one._trainer.control)
        assert one.meta == {}
        one.epoch_ends(one._trainer.control)
        one.done()
        assert one.meta == ({"epoch_ended": True} if is_told else {})
        one.step_begins()
        assert one.meta == {}


def test_an_epoch_that_a_callback_ends_has_ended_with_its_step() -> None:
    one = tail(should_epoch_stop=True)
    one.step_ends(one._trainer.control)
    assert one.meta == {"epoch_ended": True}
