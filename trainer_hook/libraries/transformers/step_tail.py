"""What Trainer does at the end of a step after the optimizer: evaluation, the script's own save, the end of an epoch.

A just-in-time save cannot wait for an evaluation. So the checkpoint holds the random state from before it and says what was
still to be done; the resumed run does that first. Its evaluation draws what the uninterrupted one would have drawn, and the
learning rate, the best model and early stopping hear of it.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer_hook.process.log import say
from trainer_hook.saving.step_saver import META_UNFINISHED

EVALUATE, SAVE, EPOCH_END, STOP = "evaluate", "save", "epoch-end", "stop"


def unfinished_of(meta: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a checkpoint says is still to be done of its step; of it, what this version knows."""
    left = meta.get(META_UNFINISHED)
    return tuple(part for part in (EVALUATE, SAVE, EPOCH_END, STOP) if isinstance(left, list) and part in left)


class StepTail:
    """How far the end of the step has come, in one ``train()`` call."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._stage = ""
        self._control: Any = None
        self._doing: tuple[str, ...] | None = None
        self._random: dict[str, Any] | None = None

    @property
    def is_doing(self) -> bool:
        """Whether the trainer's own evaluation or save is under way, rather than one that a callback began."""
        return self._doing is not None

    @property
    def unfinished(self) -> tuple[str, ...]:
        """What is still to be done at this instant."""
        if not self._stage:
            return ()
        left = self._asked_for() if self._doing is None else self._doing
        ends = (EPOCH_END,) if self.goes_on else ()
        return (*left, *ends, *((STOP,) if self._control.should_training_stop else ()))

    def _asked_for(self) -> tuple[str, ...]:
        control = self._control
        return (*((EVALUATE,) if control.should_evaluate else ()), *((SAVE,) if control.should_save else ()))

    @property
    def goes_on(self) -> bool:
        """Whether the end of the epoch is still to come after the step's own evaluation and save."""
        return self._stage == "step" and self._ends_epoch()

    def step_begins(self) -> None:
        """Nothing of the step before is left."""
        self._stage = ""
        self._doing = self._random = None

    def step_ends(self, control: Any) -> None:
        """The optimizer has stepped; in ``control`` every callback of the script has said what is to follow."""
        self._stage, self._control = "step", control

    def epoch_ends(self, control: Any) -> None:
        """As ``step_ends``, for what follows the last step of an epoch."""
        self._stage, self._control = "epoch", control

    @contextlib.contextmanager
    def doing(self) -> Iterator[None]:
        """While what is left is done. What an interrupted evaluation has drawn until then is to be drawn again."""
        from trainer_hook.loops import randomness

        self._control = self._trainer.control
        # An evaluation on several datasets takes the wish back after the first.
        self._doing = self._asked_for()
        if EVALUATE in self._doing:
            self._random = randomness.read(alone=self._alone())
        yield
        self._doing = self._random = None  # not after an error: it may be the pod that goes, and takes DataLoader workers first

    def done(self) -> None:
        """All that follows the step, or the epoch, is done."""
        if not self.goes_on:
            self._stage = ""

    def rewind(self) -> None:
        """Set the random generators to what they were before the evaluation that is interrupted now."""
        from trainer_hook.loops import randomness

        if self._random is not None:
            randomness.restore(self._random, alone=self._alone())

    def catch_up(self, unfinished: tuple[str, ...], folder: Path, *, ignore_keys: list[str] | None) -> None:
        """Do what the step that a run resumes from has left. Called when training begins, before the first batch.

        Args:
            unfinished: As the marker says.
            folder: The checkpoint, which holds the random state from before.
            ignore_keys: ``ignore_keys_for_eval`` of ``train()``.
        """
        from trainer_hook.loops import randomness

        trainer, alone = self._trainer, self._alone()
        say(f"does first what {folder.name} has left: {', '.join(unfinished)}")
        at_start = randomness.read(alone=alone)
        trainer._load_rng_state(str(folder))
        control = self._control = trainer.control
        control.should_evaluate = EVALUATE in unfinished
        control.should_save = SAVE in unfinished and not _is_same(own_folder(trainer), folder)
        self._stage = "step" if EPOCH_END in unfinished else "epoch"
        self._finish_step(ignore_keys)
        if EPOCH_END in unfinished:
            trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
            self._finish_step(ignore_keys)
        self._note_best(folder)
        trainer.control.should_training_stop |= STOP in unfinished
        # Trainer loads the random state once more, after it has skipped the batches that were used; until then it draws
        # as it would without an evaluation.
        afterwards = randomness.read(alone=alone)
        randomness.restore(at_start, alone=alone)

        def load_rng_state(checkpoint: Any) -> None:
            del trainer._load_rng_state
            randomness.restore(afterwards, alone=alone)

        trainer._load_rng_state = load_rng_state

    def _finish_step(self, ignore_keys: list[str] | None) -> None:
        import torch

        trainer = self._trainer
        known: Mapping[str, Any] = {
            "tr_loss": torch.tensor(0.0),
            "grad_norm": None,
            "model": trainer.model_wrapped,
            "trial": None,
            "epoch": int(trainer.state.epoch or 0),
            "ignore_keys_for_eval": ignore_keys,
            "start_time": time.time(),
        }
        trainer.control.should_log = False  # its loss was not saved
        wanted = inspect.signature(type(trainer)._maybe_log_save_evaluate).parameters
        trainer._maybe_log_save_evaluate(**{name: value for name, value in known.items() if name in wanted})

    def _note_best(self, folder: Path) -> None:
        """Name the checkpoint as the best model's, where the script's own save of it would have been this very folder."""
        state = self._trainer.state
        if getattr(state, "best_global_step", None) == state.global_step and _is_same(own_folder(self._trainer), folder):
            state.best_model_checkpoint = str(own_folder(self._trainer))

    def _ends_epoch(self) -> bool:
        control, epoch = self._control, self._trainer.state.epoch
        # Trainer ends the epoch, too, when it is told to stop in the middle of one.
        return bool(control.should_training_stop or control.should_epoch_stop or (epoch and float(epoch).is_integer()))

    def _alone(self) -> bool:
        return bool(self._trainer.args.world_size <= 1)


def own_folder(trainer: Any) -> Path:
    """Return where the script's own save of the step at which a Trainer stands goes."""
    return Path(trainer._get_output_dir(None)).absolute() / f"checkpoint-{trainer.state.global_step}"


def _is_same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


@contextlib.contextmanager
def no_step_too_many(trainer: Any) -> Iterator[None]:
    """Have a resumed run that stands at its end begin no epoch: Trainer would train one step of it."""
    original: Callable[..., Any] | None = getattr(trainer, "_run_epoch", None)
    if original is None:  # before transformers 5
        yield
        return

    def run_epoch(*args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step >= trainer.state.max_steps:
            trainer.control.should_training_stop = True
        return None if trainer.control.should_training_stop else original(*args, **kwargs)

    trainer._run_epoch = run_epoch
    try:
        yield
    finally:
        del trainer._run_epoch
