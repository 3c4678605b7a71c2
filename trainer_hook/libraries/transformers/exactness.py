"""Says when a resumed Hugging Face run cannot draw and do what an uninterrupted one would, and why."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from trainer_hook.process.log import say

_LOOKS_AT = 2
"""Which fetch of batches is looked at: the first of a pass also shuffles."""
_HAVE_STATE = ("EarlyStoppingCallback",)
"""Callbacks of the library that decide by what they have seen."""


def known_reasons(trainer: Any, step: int) -> list[str]:
    """Return why a resume at a step will not be bit-identical, as far as the script's arguments tell."""
    args, reasons = trainer.args, []
    if args.ignore_data_skip:
        reasons.append("ignore_data_skip begins the data anew")
    if not getattr(args, "restore_callback_states_from_checkpoint", True):
        names = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
        forgetful = [name for name in names if name in _HAVE_STATE]
        if forgetful:
            reasons.append(f"{', '.join(forgetful)} forgets what it has seen: set restore_callback_states_from_checkpoint=True")
    if args.dataloader_num_workers:
        reasons.append("if the dataset draws random numbers in its worker processes, they are others now")
    # TRL's trainers that generate keep what they generated for several steps, and save none of it.
    every = getattr(trainer, "num_iterations", 1) * (getattr(args, "steps_per_generation", None) or 0)
    if hasattr(trainer, "_buffered_inputs") and every and step * args.gradient_accumulation_steps % every:
        reasons.append("completions that serve several steps are generated anew, as this is in the middle of them")
    return reasons


@contextlib.contextmanager
def told(trainer: Any, step: int) -> Iterator[None]:
    """Tell the reasons once: those that are known, and whether fetching a batch turns out to draw random numbers."""
    say_why_not(known_reasons(trainer, step))
    original = getattr(trainer, "get_batch_samples", None)
    if original is None:
        yield
        return
    fetched = 0

    def get_batch_samples(*args: Any, **kwargs: Any) -> Any:
        nonlocal fetched
        fetched += 1
        if fetched < _LOOKS_AT:
            return original(*args, **kwargs)
        vars(trainer).pop("get_batch_samples", None)
        before = _drawn()
        batches = original(*args, **kwargs)
        if _drawn() != before:
            # Batches are fetched ahead, before the random state of the checkpoint is set.
            say_why_not(["the dataset or its collator draws from the global random state, such as for augmentation or masking"])
        return batches

    trainer.get_batch_samples = get_batch_samples
    try:
        yield
    finally:
        vars(trainer).pop("get_batch_samples", None)


def say_why_not(reasons: list[str]) -> None:
    """Say in one line why a resume is not exact, if there is a reason."""
    if reasons:
        say(f"this resume is not bit-identical: {'; '.join(reasons)}")


def _drawn() -> Any:
    """Return something that differs once a number was drawn."""
    import random

    import numpy as np
    import torch

    numpy: Any = np.random.get_state()
    return random.getstate(), bytes(numpy[1].data), numpy[2:], bytes(torch.get_rng_state().numpy().data)
