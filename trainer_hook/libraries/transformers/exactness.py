"""Reasons why a resumed Hugging Face run is not bit-identical to an uninterrupted one, for the log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from trainer_hook.process.log import info
from trainer_hook.process.patching import replaced

_STATEFUL_CALLBACKS = ("EarlyStoppingCallback",)
"""Callbacks of the library with a state that decides about training."""
_OWN_MODELS = {
    "SyncRefModelCallback": "ref_model_sync_steps",
    "SyncTeacherModelCallback": "teacher_sync_steps",
    "BEMACallback": "",
}
"""TRL's callbacks that change a second model, which Trainer does not save, and the argument with the steps up to a change."""


def known_reasons(trainer: Any, step: int) -> list[str]:
    """Return the reasons that follow from the script's arguments, for a resume at a step."""
    from trainer_hook.loops.loading import EPOCH_OF_WORKERS, has_own_epoch

    args, reasons = trainer.args, []
    if args.ignore_data_skip:
        reasons.append("ignore_data_skip begins the data anew")
    if not getattr(args, "restore_callback_states_from_checkpoint", True):
        names = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
        stateful = [name for name in names if name in _STATEFUL_CALLBACKS]
        if stateful:
            reasons.append(f"{', '.join(stateful)} forgets what it has seen: set restore_callback_states_from_checkpoint=True")
    if args.dataloader_num_workers:
        reasons.append("if the dataset draws random numbers in its worker processes, they are others now")
    if getattr(args, "dataloader_persistent_workers", False) and has_own_epoch(getattr(trainer, "train_dataset", None)):
        reasons.append(EPOCH_OF_WORKERS)
    for callback in trainer.callback_handler.callbacks:
        first_change = _OWN_MODELS.get(type(callback).__name__)
        if first_change is not None and step >= getattr(args, first_change, 1):
            reasons.append(f"the model that {type(callback).__name__} keeps beside the trained one begins anew")
    # TRL's generating trainers use their completions for several steps, and do not save them.
    every = getattr(trainer, "num_iterations", 1) * (getattr(args, "steps_per_generation", None) or 0)
    if hasattr(trainer, "_buffered_inputs") and every and step * args.gradient_accumulation_steps % every:
        reasons.append("completions that serve several steps are generated anew, as this is in the middle of them")
    return reasons


@contextlib.contextmanager
def reported(trainer: Any, step: int) -> Iterator[None]:
    """Log the known reasons, and once if fetching a batch is seen to draw random numbers."""
    report(known_reasons(trainer, step))
    original = getattr(trainer, "get_batch_samples", None)
    if original is None:
        yield
        return
    last_pass: Any = object()  # none yet

    def get_batch_samples(*args: Any, **kwargs: Any) -> Any:
        nonlocal last_pass
        this_pass = args[0] if args else kwargs.get("epoch_iterator")
        if last_pass is not this_pass:  # the first fetch of a pass also shuffles
            last_pass = this_pass
            return original(*args, **kwargs)
        vars(trainer).pop("get_batch_samples", None)
        before = _drawn()
        batches = original(*args, **kwargs)
        if _drawn() != before:
            # Batches are fetched ahead, before the random state of the checkpoint is set.
            report(["the dataset or its collator draws from the global random state, such as for augmentation or masking"])
        return batches

    with replaced(trainer, "get_batch_samples", get_batch_samples):
        yield


def report(reasons: list[str]) -> None:
    """Log why a resume is not exact, in one line; nothing without a reason."""
    if reasons:
        info(f"this resume is not bit-identical: {'; '.join(reasons)}")


def _drawn() -> Any:
    """Return a value that changes with each number drawn."""
    import random

    import numpy as np
    import torch

    numpy: Any = np.random.get_state()
    return random.getstate(), bytes(numpy[1].data), numpy[2:], bytes(torch.get_rng_state().numpy().data)
