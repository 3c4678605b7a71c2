"""A ``train()`` call that finished in an earlier pod: its outcome, and the state in which it left the Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer_hook.libraries.transformers.callback_states import latest_restored
from trainer_hook.libraries.transformers.checkpoint_files import read_state
from trainer_hook.process.log import warn
from trainer_hook.resuming.resumer import Choice, Resumer


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


def hand_over(trainer: Any, choice: Choice, resumer: Resumer) -> None:
    """Set what the script finds in the Trainer after ``train()``, and what a second call of it begins with. Collective."""
    trainer.state.stateful_callbacks = read_state(choice.path).get("stateful_callbacks") or {}  # those of final/ are older
    with latest_restored(trainer):
        trainer._load_callback_state()
    _load_optimizer(trainer, choice, resumer)
    trainer._load_rng_state(str(choice.path))


def _load_optimizer(trainer: Any, choice: Choice, resumer: Resumer) -> None:
    """Load the optimizer, with the moments of Adam, and the scheduler of the last step."""
    import torch

    trainer.create_optimizer()
    if trainer.lr_scheduler is None:  # unless it is the script's own, for all calls
        trainer.create_scheduler(trainer.state.max_steps, trainer.optimizer)
    why = resumer.fetch(choice.name)
    try:
        if why is None:
            optimizer = torch.load(choice.path / "optimizer.pt", map_location="cpu", weights_only=True)
            trainer.optimizer.load_state_dict(optimizer)
            trainer.lr_scheduler.load_state_dict(torch.load(choice.path / "scheduler.pt", weights_only=True))
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    if why is not None:
        warn(f"the optimizer is a fresh one, also for a further train(): that of {choice.name} cannot be loaded ({why})")
