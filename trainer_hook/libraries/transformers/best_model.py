"""``load_best_model_at_end``: the best model survives the pod, too.

Trainer looks for it in the script's ``output_dir``, which is empty in a new pod; it would then end with the last weights
instead, and say so in one line among many.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainer_hook.process.log import say, warn
from trainer_hook.resuming.resumer import Resumer


def is_new_best(trainer: Any) -> bool:
    """Whether the script saves a step because training is to end with it, unless a better one comes."""
    step = getattr(trainer.state, "best_global_step", None)
    return bool(trainer.args.load_best_model_at_end and step and step == trainer.state.global_step)


def look_on_volume(trainer: Any, volume: Path, name_of: Callable[[int], str]) -> None:
    """Have a resumed Trainer expect the best model on the volume where the script's own copy of it is gone.

    It need not be there yet: ``brought_at_end`` sees to it.
    """
    state = trainer.state
    step = getattr(state, "best_global_step", None)
    if not trainer.args.load_best_model_at_end or not step:
        return
    if state.best_model_checkpoint is None or not Path(state.best_model_checkpoint).is_dir():
        state.best_model_checkpoint = str(volume / name_of(step))


@contextlib.contextmanager
def brought_at_end(trainer: Any, volume: Path, resumer: Resumer, agree: Callable[[bool], bool]) -> Iterator[None]:
    """Fetch the best model from the store before it is loaded, if it is expected on the volume and not there."""
    original = trainer._load_best_model

    def load_best_model(*args: Any, **kwargs: Any) -> Any:
        best = Path(trainer.state.best_model_checkpoint)
        if best.parent == volume and not agree(best.is_dir()):
            say(f"fetches {best.name}, the best model")
            reason = resumer.bring(best.name)
            if reason is not None:
                warn(f"the best model, {best.name}, is not to be had ({reason}): training ends with the last weights")
                trainer.state.best_model_checkpoint = None
                return None
        return original(*args, **kwargs)

    trainer._load_best_model = load_best_model
    try:
        yield
    finally:
        del trainer._load_best_model
