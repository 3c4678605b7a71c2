"""The callbacks of a Trainer when it restores their states (``restore_callback_states_from_checkpoint``)."""

from __future__ import annotations

import contextlib
from typing import Any

from trainer_hook.process.patching import surrounded


def kept_last(handler: Any, callback: Any) -> contextlib.AbstractContextManager[None]:
    """Keep a callback behind all others: Trainer adds the restored ones at the end, in place of the script's."""

    def move() -> None:
        handler.callbacks.remove(callback)
        handler.callbacks.append(callback)

    return surrounded(handler, "add_callback", after=move)


def latest_restored(trainer: Any) -> contextlib.AbstractContextManager[None]:
    """Have several callbacks of one class restored from their latest states.

    Each save of Trainer appends their states to a list, of which it restores the first ones.
    """

    def drop_older() -> None:
        state, names = trainer.state, [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
        for name, states in state.stateful_callbacks.items():
            if isinstance(states, list) and name in names:
                state.stateful_callbacks[name] = states[-names.count(name) :]

    return surrounded(trainer, "_load_callback_state", before=drop_older)
