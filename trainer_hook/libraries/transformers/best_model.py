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


class BestModel:
    """The best model of one ``train()`` call. Every method is called on every rank at the same point of training."""

    def __init__(
        self,
        trainer: Any,
        volume: Path,
        resumer: Resumer,
        agree: Callable[[bool], bool],
        name_of: Callable[[int], str],
        *,
        is_noticed: Callable[[], bool],
        stop_if_noticed: Callable[[], None],
    ) -> None:
        """Create it for one call.

        ``agree`` as ``RankConsensus.all_agree``; ``name_of`` returns the name of the checkpoint of a step; ``is_noticed`` of
        this rank; ``stop_if_noticed`` as ``TrainCall.stop_if_noticed``.
        """
        self._trainer = trainer
        self._volume = volume
        self._resumer = resumer
        self._agree = agree
        self._name_of = name_of
        self._is_noticed = is_noticed
        self._stop_if_noticed = stop_if_noticed
        self._is_on_volume = False
        """Whether the ranks agreed to look on the volume. The same on every rank, unlike the path in Trainer's state."""

    def expect_on_volume(self) -> None:
        """Have a resumed Trainer look for the best model on the volume if a rank's own copy is gone.

        It need not be there yet: ``from_store`` fetches it.
        """
        state = self._trainer.state
        step = getattr(state, "best_global_step", None)
        if not self._trainer.args.load_best_model_at_end or not step:
            return
        own = state.best_model_checkpoint
        self._is_on_volume = not self._agree(own is not None and _is_here(Path(own)))
        if self._is_on_volume:
            state.best_model_checkpoint = str(self._volume / self._name_of(step))

    def from_store(self) -> contextlib.AbstractContextManager[None]:
        """Fetch the best model before Trainer loads it, if it is expected on the volume and missing there."""
        original = self._trainer._load_best_model

        def load_best_model(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if self._is_loadable() else None

        return replaced(self._trainer, "_load_best_model", load_best_model)

    def _is_loadable(self) -> bool:
        state = self._trainer.state
        best = Path(state.best_model_checkpoint)
        is_elsewhere = best.parent != self._volume
        # A rank whose own disk has a better one by now looks there: Trainer asks the disk of each.
        if self._agree(is_elsewhere) if self._is_on_volume else is_elsewhere:
            return True
        if self._is_on_volume:
            best = self._volume / self._name_of(state.best_global_step)
            state.best_model_checkpoint = str(best)
        is_there = self._agree(_is_here(best)) and self._resumer.is_same_on_all(best)
        if is_there and self._agree(self._resumer.is_usable(best.name)):
            return True
        info(f"fetches {best.name}, the best model")
        reason = self._resumer.fetch(best.name, is_wanted=lambda _: not self._is_noticed())
        self._stop_if_noticed()  # the next pod fetches it, and ends as this one would have
        if reason is None or is_there:
            return True
        warn(f"the best model, {best.name}, cannot be fetched ({reason}): training ends with the last weights")
        state.best_model_checkpoint = None
        return False


def _is_here(folder: Path) -> bool:
    """Whether a folder is there and can be seen now: an error on one rank would leave the others waiting."""
    try:
        return folder.is_dir()
    except OSError:
        return False
