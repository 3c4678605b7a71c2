"""The position in the data where Trainer's own calculation does not find it.

Trainer takes all finished steps for those of whole epochs. A run that resumes in a later pass over a dataset without a length,
which ``max_steps`` reads several times, would skip the first pass, and begin the next with its first batch. The same holds
after an epoch that a callback has ended early (``should_epoch_stop``).
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from trainer_hook.libraries.transformers.checkpoint_files import read_state
from trainer_hook.libraries.transformers.step_tail import STOP, has_epoch_ended, unfinished_of
from trainer_hook.process.patching import replaced, surrounded
from trainer_hook.resuming.resumer import Choice


def pass_continued(trainer: Any, choice: Choice) -> contextlib.AbstractContextManager[None]:
    """Have a run that resumes from ``choice`` continue in its pass, at its batch, or with the next pass."""
    state, has_ended = read_state(choice.path), has_epoch_ended(choice.meta)
    original = getattr(trainer, "_init_training_state", None)
    if original is None:  # before transformers 5

        def before_5(steps: int) -> tuple[int, int] | None:
            step, (max_steps, epochs) = int(trainer.state.global_step), _limits(state, trainer.args, steps)
            if STOP in unfinished_of(choice.meta) or step >= max_steps:
                return sys.maxsize, 0  # after the last epoch: Trainer would train one step more
            # Of whole epochs Trainer's own count is right, also in its oldest versions, which round the steps of an epoch down.
            is_needed = has_ended or epochs == sys.maxsize or step <= float(state.get("epoch") or 0) * steps - 1 + 1e-6
            found = _position(state, trainer.args, steps=steps, max_steps=max_steps, epochs=epochs, has_ended=has_ended)
            return (found[0], found[1] // trainer.args.gradient_accumulation_steps) if found and is_needed else None

        return surrounded(trainer, "_load_callback_state", after=lambda: _TrainedSteps.tell(trainer, before_5))

    def init_training_state(*args: Any, **kwargs: Any) -> Any:
        trained = original(*args, **kwargs)
        told = inspect.signature(original).bind(*args, **kwargs).arguments
        steps, max_steps, epochs = (told[name] for name in ("num_update_steps_per_epoch", "max_steps", "num_train_epochs"))
        found = _position(state, trainer.args, steps=steps, max_steps=max_steps, epochs=epochs, has_ended=has_ended)
        return trained if found is None else found

    return replaced(trainer, "_init_training_state", init_training_state)


class _TrainedSteps(int):
    """Trainer's count of steps, from which Trainer before 5 calculates the epoch (``//``), and then its used steps (``%``)."""

    _trainer: Any
    _found: tuple[int, int]
    _find: Callable[[int], tuple[int, int] | None]

    @classmethod
    def tell(cls, trainer: Any, find: Callable[[int], tuple[int, int] | None]) -> None:
        """Have the next calculation give what ``find`` says of the number of steps of an epoch, if it is not ``None``."""
        steps = cls(trainer.state.global_step)
        steps._trainer, steps._find = trainer, find
        trainer.state.global_step = steps

    def __floordiv__(self, steps: int) -> int:
        self._found = self._find(steps) or divmod(int(self), steps)
        if self._trainer.args.ignore_data_skip:  # then the used steps are not asked for
            self._trainer.state.global_step = int(self)
        return self._found[0]

    def __mod__(self, steps: int) -> int:
        self._trainer.state.global_step = int(self)
        return self._found[1]


def _limits(state: Mapping[str, Any], args: Any, steps: int) -> tuple[int, int]:
    """Return the last step and the number of epochs, as Trainer calculates them. ``steps``: of an epoch."""
    if args.max_steps <= 0:
        return math.ceil(args.num_train_epochs * steps), math.ceil(args.num_train_epochs)
    has_no_length = steps == args.max_steps and state.get("num_train_epochs") == sys.maxsize
    return args.max_steps, sys.maxsize if has_no_length else math.ceil(args.max_steps / steps)


def _position(
    state: Mapping[str, Any], args: Any, *, steps: int, max_steps: int, epochs: int, has_ended: bool
) -> tuple[int, int] | None:
    """Return the epoch and its used batches where Trainer's own calculation may not find them."""
    if epochs == sys.maxsize:  # Trainer's number where only max_steps ends training
        return position(state, args, has_ended=has_ended)
    if has_same_epochs(state, max_steps=max_steps, epochs=epochs):
        return position_in_epochs(state, args, steps=steps, has_ended=has_ended)
    return None  # of another number of ranks, or another batch size: Trainer counts steps, and so ends at max_steps


def position(state: Mapping[str, Any], args: Any, *, has_ended: bool = False) -> tuple[int, int] | None:
    """Return the pass and its used batches, if the dataset has no length; ``None``: it is the first pass, or unknown.

    ``state``: content of ``trainer_state.json``, whose ``epoch`` counts passes, and batches as a part of all steps.
    ``has_ended``: the pass had ended.
    """
    epoch, max_steps = state.get("epoch"), state.get("max_steps")
    if args.ignore_data_skip or args.max_steps <= 0 or not epoch or not max_steps:
        return None
    if has_ended:
        return int(epoch) + 1, 0
    if epoch < 1:
        return None
    return int(epoch), round((epoch - int(epoch)) * max_steps * args.gradient_accumulation_steps)


def has_same_epochs(state: Mapping[str, Any], *, max_steps: int, epochs: int) -> bool:
    """Whether a whole epoch has as many steps in this run, of ``max_steps`` and ``epochs``, as in the one that saved."""
    saved_steps, saved_epochs = state.get("max_steps"), state.get("num_train_epochs")
    return saved_steps is not None and saved_epochs is not None and saved_steps * epochs == max_steps * saved_epochs


def position_in_epochs(state: Mapping[str, Any], args: Any, *, steps: int, has_ended: bool) -> tuple[int, int] | None:
    """Return the epoch and its used batches; ``None``: it is the first one, at its beginning, or unknown.

    Where no epoch was ended early, Trainer's own calculation has the same result. ``steps``: of a whole epoch.
    """
    epoch = state.get("epoch")
    if args.ignore_data_skip or not epoch:
        return None
    if has_ended:
        return int(epoch) + 1, 0
    # Rounded down: the last step of an epoch may have fewer batches than the others.
    return int(epoch), int((epoch - int(epoch)) * steps + 1e-6) * args.gradient_accumulation_steps
