"""The position in the data where Trainer's own calculation does not find it.

Trainer takes all finished steps for those of whole epochs. A run that resumes in a later pass over a dataset without a length,
which ``max_steps`` reads several times, would skip the first pass, and begin the next with its first batch. The same holds
after an epoch that a callback has ended early (``should_epoch_stop``).
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from trainer_hook.libraries.transformers.exactness import report
from trainer_hook.libraries.transformers.step_tail import has_epoch_ended
from trainer_hook.process.patching import replaced
from trainer_hook.resuming.resumer import Choice, read_state


@contextlib.contextmanager
def pass_continued(trainer: Any, choice: Choice) -> Iterator[None]:
    """Have a run that resumes from ``choice`` continue in its pass, at its batch, or with the next pass."""
    state, has_ended = read_state(choice.path), has_epoch_ended(choice.meta)
    original = getattr(trainer, "_init_training_state", None)
    if original is None:  # before transformers 5
        if position(state, trainer.args, has_ended=has_ended) is not None and not hasattr(trainer.train_dataset, "__len__"):
            report(["the dataset has no length and is read several times: the next pass begins now"])
        yield
        return

    def init_training_state(*args: Any, **kwargs: Any) -> Any:
        trained = original(*args, **kwargs)
        told = inspect.signature(original).bind(*args, **kwargs).arguments
        if told["num_train_epochs"] == sys.maxsize:  # Trainer's number where only max_steps ends training
            found = position(state, trainer.args, has_ended=has_ended)
        elif has_same_epochs(state, max_steps=told["max_steps"], epochs=told["num_train_epochs"]):
            steps = told["num_update_steps_per_epoch"]
            found = position_in_epochs(state, trainer.args, steps=steps, has_ended=has_ended)
        else:  # of another number of ranks, or another batch size: Trainer counts steps, and so ends at max_steps
            found = None
        return trained if found is None else found

    with replaced(trainer, "_init_training_state", init_training_state):
        yield


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
