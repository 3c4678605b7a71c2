"""``load_best_model_at_end`` in a new pod: the best model comes from the store.

Trainer looks for it in the script's ``output_dir``, which is empty in a new pod, and would end with the last weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer_hook.process.log import info, warn
from trainer_hook.process.patching import replaced
from trainer_hook.resuming.resumer import Resumer


def is_new_best(trainer: Any) -> bool:
    """Whether the current step has the best model so far, with which training is to end."""
    step = getattr(trainer.state, "best_global_step", None)
    return bool(trainer.args.load_best_model_at_end and step and step == trainer.state.global_step)


def expect_best_on_volume(trainer: Any, volume: Path, name_of: Callable[[int], str]) -> None:
    """Have a resumed Trainer look for the best model on the volume if the script's own copy is gone.

    It need not be there yet: ``best_from_store`` fetches it.
    """
    state = trainer.state
    step = getattr(state, "best_global_step", None)
    if not trainer.args.load_best_model_at_end or not step:
        return
    if state.best_model_checkpoint is None or not Path(state.best_model_checkpoint).is_dir():
        state.best_model_checkpoint = str(volume / name_of(step))


def best_from_store(
    trainer: Any, volume: Path, resumer: Resumer, agree: Callable[[bool], bool]
) -> contextlib.AbstractContextManager[None]:
    """Fetch the best model before Trainer loads it, if it is expected on the volume and missing there."""
    original = trainer._load_best_model

    def load_best_model(*args: Any, **kwargs: Any) -> Any:
        best = Path(trainer.state.best_model_checkpoint)
        if best.parent == volume and not agree(best.is_dir()):
            info(f"fetches {best.name}, the best model")
            reason = resumer.fetch(best.name)
            if reason is not None:
                warn(f"the best model, {best.name}, cannot be fetched ({reason}): training ends with the last weights")
                trainer.state.best_model_checkpoint = None
                return None
        return original(*args, **kwargs)

    return replaced(trainer, "_load_best_model", load_best_model)
