"""The callback through which one ``train()`` call follows the steps of a Hugging Face Trainer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from trainer_hook.libraries.transformers.best_model import is_new_best
from trainer_hook.libraries.transformers.checkpoint_files import META_STOPPED_EARLY
from trainer_hook.libraries.transformers.driver import TrainerDriver
from trainer_hook.libraries.transformers.epoch_start import EpochStart
from trainer_hook.libraries.transformers.script_saves import ScriptSaves
from trainer_hook.process.log import info
from trainer_hook.train_call.train_call import TrainCall


class _CheckpointHook:
    """Saves when the schedule, a request or a notice says so, at the end of a step: the exact point to resume from."""

    def __init__(
        self, call: TrainCall, driver: TrainerDriver, script_saves: ScriptSaves, start: EpochStart, begin: Callable[[], None]
    ) -> None:
        """``begin``: called when training begins, before the first batch."""
        self._call = call
        self._trainer = driver.trainer
        self._tail = driver.tail
        self._script_saves = script_saves
        self._start = start
        self._begin = begin

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begin()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start.epoch_begins(kwargs.get("train_dataloader"), control)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start.step_begins()
        self._tail.step_begins()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tail.step_ends(control)
        self._call.step_ended()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start.epoch_ends(control)
        self._tail.epoch_ends(control)
        if self._call.monitor.schedule.due_at_epoch_end():
            self._call.request("periodic")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start.training_ends()

    def save_what_is_due(self) -> None:
        """Runs after the evaluation and the script's own save of a step: both may draw random numbers."""
        if self._tail.is_epoch_end_due:  # with an evaluation and a save of its own
            return
        self._tail.done()
        state, ends = self._trainer.state, self._tail.is_last
        if ends:
            self._call.request("periodic")
        stopped = {META_STOPPED_EARLY: True} if ends and state.global_step < state.max_steps else {}
        self._call.save_pending(self._tail.meta | stopped)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Inside an evaluation the last finished step is still the point to resume from.
        if self._trainer.is_in_train and self._tail.can_stop(self._call.consensus.all_agree):
            due = self._call.monitor.inside("evaluate")
            if due.stop and not self._tail.is_doing:
                info("a callback evaluates now: the resume will draw other random numbers")
            self._call.act_on(due)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._script_saves.publish()
        if is_new_best(self._trainer):
            self._call.request("periodic")


@functools.cache
def callback_class() -> Any:
    """Return the class, a ``TrainerCallback`` of the imported library."""
    from transformers.trainer_callback import TrainerCallback

    return type("CheckpointHook", (_CheckpointHook, TrainerCallback), {})
