"""``CKPT_ASYNC=1`` for the Hugging Face Trainer: when a save may be asynchronous, and which code may run meanwhile."""

from __future__ import annotations

from typing import Any

from trainer_hook.asynchronous.background import Background
from trainer_hook.process.settings import Settings
from trainer_hook.saving import async_save

LIBRARIES = {"transformers", "trl", "peft", "accelerate", "trainer_hook"}
_METHODS = ("training_step", "compute_loss", "prediction_step")
_EVENTS = ("on_epoch_begin", "on_epoch_end", "on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_evaluate")


def background_for(settings: Settings, trainer: Any) -> Background | None:
    """Return the writer of asynchronous saves; ``None``: not asked for, or not possible with this trainer."""
    kind = _distributed_type(trainer)
    return async_save.background_for(settings, None if kind in async_save.WHOLE_STATE_ON_ONE_RANK else kind)


def _distributed_type(trainer: Any) -> str:
    for flag, name in (("is_fsdp_enabled", "FSDP"), ("is_deepspeed_enabled", "DEEPSPEED")):
        if getattr(trainer, flag, False):
            return name
    kind = getattr(getattr(trainer, "accelerator", None), "distributed_type", "of unknown kind")
    return str(getattr(kind, "value", kind))


def overlapping_optimizer(trainer: Any) -> Any:
    """Return the optimizer if only its next step will change parameters; else ``None``.

    The script's code between two steps may change them, and so does Trainer when training ends (``load_best_model_at_end``).
    """
    if trainer.control.should_training_stop:
        return None
    between = [getattr(trainer, name, None) for name in _METHODS]
    between += [getattr(c, event, None) for c in trainer.callback_handler.callbacks for event in _EVENTS]
    roots = {str(getattr(method, "__module__", None)).split(".")[0] for method in between if method is not None}
    return trainer.optimizer if roots <= LIBRARIES else None
