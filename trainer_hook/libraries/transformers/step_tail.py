"""The tail of a step, after the optimizer: evaluation, the script's own save, the end of an epoch.

A just-in-time save cannot wait for an evaluation. The checkpoint then holds the random state from before it and lists the
unfinished parts of the tail; the resumed run does those first. Its evaluation draws the same random numbers as an
uninterrupted one, and its result reaches the learning rate schedule, the best model and early stopping.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_hook.libraries.transformers import random_state
from trainer_hook.process.log import info
from trainer_hook.process.patching import replaced

if TYPE_CHECKING:
    from trainer_hook.libraries.weights_sample import WeightsSample

META_UNFINISHED = "unfinished"
"""Key in ``meta``: the unfinished parts of the step's tail."""
META_EPOCH_ENDED = "epoch_ended"
"""Key in ``meta``: the pass over the data had ended at this step, although Trainer's count of epochs is no whole number."""
EVALUATE, SAVE, EPOCH_END, STOP = "evaluate", "save", "epoch-end", "stop"


def unfinished_of(meta: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the unfinished parts that a checkpoint lists and this version knows."""
    listed = meta.get(META_UNFINISHED)
    return tuple(part for part in (EVALUATE, SAVE, EPOCH_END, STOP) if isinstance(listed, list) and part in listed)


def has_epoch_ended(meta: Mapping[str, Any]) -> bool:
    """Whether the pass over the data had ended, by the ``meta`` of a marker."""
    return meta.get(META_EPOCH_ENDED) is True


class StepTail:
    """Progress through the tail of the current step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._stage = ""
        self._control: Any = None
        self._doing: tuple[str, ...] | None = None
        self._random: dict[str, Any] | None = None
        self._trained: WeightsSample | None = None
        """Of the weights that are trained, while an evaluation runs; ``None``: they cannot be compared."""
        self._is_epoch_over = False

    @property
    def meta(self) -> dict[str, Any]:
        """What the marker of a checkpoint of this instant says under ``meta``."""
        control, epoch = self._trainer.control, self._trainer.state.epoch
        is_over = self._is_epoch_over or (self._stage == "step" and control.should_epoch_stop)
        is_told = control.should_training_stop or not epoch or float(epoch).is_integer()
        return {META_EPOCH_ENDED: True} if is_over and not is_told else {}

    @property
    def is_last(self) -> bool:
        """Whether training ends with this step: it was told to stop, or its last epoch has ended, be it with fewer steps."""
        state = self._trainer.state
        is_last_epoch = self._is_epoch_over and math.ceil(state.epoch or 0) >= state.num_train_epochs
        return bool(self._trainer.control.should_training_stop or is_last_epoch)

    @property
    def is_doing(self) -> bool:
        """Whether the trainer's own evaluation or save is under way, rather than one that a callback began."""
        return self._doing is not None

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Parts that are not done at this instant."""
        if not self._stage:
            return ()
        due = self._requested() if self._doing is None else self._doing
        ends = (EPOCH_END,) if self.is_epoch_end_due else ()
        return (*due, *ends, *((STOP,) if self._control.should_training_stop else ()))

    def _requested(self) -> tuple[str, ...]:
        control = self._control
        return (*((EVALUATE,) if control.should_evaluate else ()), *((SAVE,) if control.should_save else ()))

    @property
    def is_epoch_end_due(self) -> bool:
        """Whether the end of the epoch is still to come after the step's own evaluation and save."""
        return self._stage == "step" and self._ends_epoch()

    def step_begins(self) -> None:
        """The tail of the step before is done."""
        self._stage = ""
        self._doing = self._random = None
        self._is_epoch_over = False

    def step_ends(self, control: Any) -> None:
        """The optimizer has stepped, and every callback of the script has set its requests in ``control``."""
        self._stage, self._control = "step", control

    def epoch_ends(self, control: Any) -> None:
        """As ``step_ends``, for what follows the last step of an epoch."""
        self._stage, self._control = "epoch", control
        self._is_epoch_over = True

    @contextlib.contextmanager
    def doing(self) -> Iterator[None]:
        """Surround the trainer's own evaluation and save: an interrupted evaluation is repeated."""
        self._control = self._trainer.control
        # An evaluation on several datasets resets the request after the first.
        self._doing = self._requested()
        if EVALUATE in self._doing:
            self._random = random_state.read(self._trainer)
            self._trained = _sample(self._trainer)
        yield
        self._doing = self._random = self._trained = None  # not after an error: SIGTERM may have ended a DataLoader worker

    def can_stop(self, agree: Callable[[bool], bool]) -> bool:
        """Whether all ranks may stop inside this evaluation: it runs with the weights that are trained. Collective.

        ``agree``: as ``RankConsensus.all_agree``.
        """
        return not self.is_doing or self._trained is None or self._trained.is_same(agree)

    def done(self) -> None:
        """The tail of the step, or of the epoch, is done."""
        if not self.is_epoch_end_due:
            self._stage = ""

    def rewind(self) -> None:
        """Set the random generators back to before the evaluation that is interrupted now."""
        if self._random is not None:
            random_state.restore(self._trainer, self._random)

    def catch_up(self, meta: Mapping[str, Any], folder: Path, *, ignore_keys: list[str] | None) -> None:
        """Do the unfinished parts of the step that a run resumes from, before its first batch.

        ``meta``: of the checkpoint's marker. ``folder``: the checkpoint, which holds the random state from before.
        ``ignore_keys``: those for the evaluation.
        """
        trainer, unfinished = self._trainer, unfinished_of(meta)
        if not unfinished:
            return
        info(f"does first what {folder.name} left unfinished: {', '.join(unfinished)}")
        at_start = random_state.read(trainer)
        trainer._load_rng_state(str(folder))
        control = self._control = trainer.control
        control.should_evaluate = EVALUATE in unfinished
        control.should_save = SAVE in unfinished and not _is_same(script_folder(trainer), folder)
        self._stage = "step" if EPOCH_END in unfinished else "epoch"
        self._is_epoch_over = has_epoch_ended(meta)
        self._finish_step(ignore_keys)
        if EPOCH_END in unfinished:
            trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
            self._finish_step(ignore_keys)
        state, own = trainer.state, script_folder(trainer)
        if getattr(state, "best_global_step", None) == state.global_step and _is_same(own, folder):
            state.best_model_checkpoint = str(own)  # the script would have saved the best model in this folder
        trainer.control.should_training_stop |= STOP in unfinished
        # Trainer loads the random state again once it has skipped the used batches; until then it draws as usual.
        random_state.restore_at_next_load(trainer, random_state.read(trainer))
        random_state.restore(trainer, at_start)

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

    def _ends_epoch(self) -> bool:
        control, epoch = self._control, self._trainer.state.epoch
        # Trainer ends the epoch, too, when it is told to stop in the middle of one.
        return bool(control.should_training_stop or control.should_epoch_stop or (epoch and float(epoch).is_integer()))


def _sample(trainer: Any) -> WeightsSample | None:
    if getattr(trainer, "is_fsdp_enabled", False) or getattr(trainer, "is_deepspeed_enabled", False):
        return None  # a parameter has another form inside an evaluation
    if callable(getattr(getattr(trainer.optimizer, "optimizer", trainer.optimizer), "eval", None)):
        return None  # a schedule-free optimizer, whose state says in which form the weights are
    from trainer_hook.libraries.weights_sample import WeightsSample  # imports torch

    return WeightsSample(trainer.model)


def script_folder(trainer: Any) -> Path:
    """Return the folder of the script's own save of the current step."""
    return Path(trainer._get_output_dir(None)).absolute() / f"checkpoint-{trainer.state.global_step}"


def _is_same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def no_second_start(trainer: Any) -> contextlib.AbstractContextManager[None]:
    """Have a resumed run not repeat the evaluation of ``eval_on_start``: callbacks such as early stopping would count it."""
    original = trainer._evaluate

    @functools.wraps(original)
    def evaluate(*args: Any, skip_scheduler: bool = False, **kwargs: Any) -> Any:
        # Only the evaluation at the start leaves the scheduler alone.
        return None if skip_scheduler else original(*args, **kwargs)

    return replaced(trainer, "_evaluate", evaluate)


@contextlib.contextmanager
def no_step_too_many(trainer: Any) -> Iterator[None]:
    """Have a resumed run that is at its last step begin no epoch: Trainer would train one step of it."""
    original: Callable[..., Any] | None = getattr(trainer, "_run_epoch", None)
    if original is None:  # before transformers 5
        yield
        return

    def run_epoch(*args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step >= trainer.state.max_steps:
            trainer.control.should_training_stop = True
        return None if trainer.control.should_training_stop else original(*args, **kwargs)

    with replaced(trainer, "_run_epoch", run_epoch):
        yield
