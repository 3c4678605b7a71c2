"""The position in a dataset without a length that ``max_steps`` reads several times.

Trainer takes all steps for those of one pass: a run that resumes in a later pass would skip the first one, and begin the next
with its first batch.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer_hook.libraries.transformers.exactness import report
from trainer_hook.process.patching import replaced
from trainer_hook.resuming.resumer import read_state


@contextlib.contextmanager
def pass_continued(trainer: Any, folder: Path) -> Iterator[None]:
    """Have a run that resumes from ``folder`` continue in its pass, at its batch."""
    found = position(read_state(folder), trainer.args)
    original = getattr(trainer, "_init_training_state", None)
    if found is None or original is None:  # before transformers 5
        if found is not None and not hasattr(trainer.train_dataset, "__len__"):
            report(["the dataset has no length and is read several times: the next pass begins now"])
        yield
        return

    def init_training_state(*args: Any, **kwargs: Any) -> Any:
        trained = original(*args, **kwargs)
        epochs = inspect.signature(original).bind(*args, **kwargs).arguments["num_train_epochs"]
        return found if epochs == sys.maxsize else trained  # Trainer's number where only max_steps ends training

    with replaced(trainer, "_init_training_state", init_training_state):
        yield


def position(state: dict[str, Any], args: Any) -> tuple[int, int] | None:
    """Return the pass and its used batches, if the dataset has no length; ``None``: it is the first pass, or unknown.

    ``state``: content of ``trainer_state.json``, whose ``epoch`` counts passes, and batches as a part of all steps.
    """
    epoch, max_steps = state.get("epoch"), state.get("max_steps")
    if args.ignore_data_skip or args.max_steps <= 0 or not epoch or not max_steps or epoch < 1:
        return None
    return int(epoch), round((epoch - int(epoch)) * max_steps * args.gradient_accumulation_steps)
