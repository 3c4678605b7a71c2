"""The random generators of a Trainer's process."""

from __future__ import annotations

from typing import Any


def read(trainer: Any) -> dict[str, Any]:
    """Return the state of the global generators."""
    from trainer_hook.loops import randomness  # imports torch

    return randomness.read(all_gpus=trainer.args.world_size <= 1)


def restore(trainer: Any, state: dict[str, Any]) -> None:
    """Set the global generators to a state of ``read``, also to a portable one."""
    from trainer_hook.loops import randomness

    randomness.restore(state, all_gpus=trainer.args.world_size <= 1)


def restore_at_next_load(trainer: Any, state: dict[str, Any]) -> None:
    """Have Trainer restore this state when it loads that of its checkpoint for the next time."""

    def load_rng_state(checkpoint: Any) -> None:
        del trainer._load_rng_state
        restore(trainer, state)

    trainer._load_rng_state = load_rng_state
