"""A ``train()`` call that finished in an earlier pod: its outcome, and the state for the next call of the Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer_hook.libraries.transformers.callback_states import latest_restored
from trainer_hook.process.log import info, warn
from trainer_hook.resuming.resumer import Choice, Resumer, read_state

_HANDED_OVER = "_checkpoint_hook_handed_over"


def training_outcome(state: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """Return the training loss and metrics that ``train()`` returned when it finished.

    ``state`` is the content of ``trainer_state.json``. That of ``final/`` holds them as Trainer logged them. From an earlier
    one the loss is the mean of the logged losses, and the times are 0.
    """
    history = [entry for entry in state.get("log_history") or () if isinstance(entry, Mapping)]
    for entry in reversed(history):
        if "train_runtime" in entry:
            return float(entry.get("train_loss", 0.0)), {name: value for name, value in entry.items() if name != "step"}
    losses = [float(entry["loss"]) for entry in history if isinstance(entry.get("loss"), int | float)]
    loss = sum(losses) / len(losses) if losses else 0.0
    speed = dict.fromkeys(("train_runtime", "train_samples_per_second", "train_steps_per_second"), 0.0)
    rest = {"total_flos": state.get("total_flos") or 0.0, "train_loss": loss, "epoch": state.get("epoch")}
    return loss, {**speed, **rest}


def hand_over(trainer: Any, choice: Choice) -> None:
    """Set the random state and the callbacks; remember the checkpoint's optimizer for a second ``train()`` of this Trainer."""
    setattr(trainer, _HANDED_OVER, choice)
    trainer.state.stateful_callbacks = read_state(choice.path).get("stateful_callbacks") or {}  # those of final/ are older
    with latest_restored(trainer):
        trainer._load_callback_state()
    trainer._load_rng_state(str(choice.path))


def forget(trainer: Any) -> None:
    """Drop what ``hand_over`` remembered: a call that resumes has an optimizer of its own, which the next call keeps."""
    vars(trainer).pop(_HANDED_OVER, None)


def take_over(trainer: Any, resumer: Resumer) -> None:
    """Load the optimizer of an earlier, finished call of this Trainer, as ``hand_over`` remembered it. Collective.

    The uninterrupted script would have kept it, with the moments of Adam.
    """
    choice: Choice | None = vars(trainer).pop(_HANDED_OVER, None)
    if choice is None or trainer.model_init is not None:  # which makes the model and the optimizer anew
        return
    if getattr(trainer, "is_deepspeed_enabled", False) or getattr(trainer, "is_fsdp_enabled", False):
        warn("this train() begins with a fresh optimizer: that of the call before is sharded, and was not loaded")
        return
    reason = resumer.fetch(choice.name)
    if reason is not None:
        warn(f"this train() begins with a fresh optimizer: {choice.name} of the call before cannot be fetched ({reason})")
        return
    import torch

    trainer.create_optimizer()
    try:
        optimizer = torch.load(choice.path / "optimizer.pt", map_location="cpu", weights_only=True)
        trainer.optimizer.load_state_dict(optimizer)
        if trainer.lr_scheduler is not None:  # the script's own, for all calls
            trainer.lr_scheduler.load_state_dict(torch.load(choice.path / "scheduler.pt", weights_only=True))
    except Exception as error:
        warn(
            f"this train() begins with a fresh optimizer: that of {choice.name} does not fit ({type(error).__name__}: {error})"
        )
    else:
        info(f"takes over the optimizer from {choice.name}, where the train() before had finished")
