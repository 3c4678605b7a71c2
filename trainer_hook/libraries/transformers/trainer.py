"""Hugging Face Trainer: ``train()`` is wrapped and a callback added; the script's arguments and own saves stay as they are."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer_hook.libraries.callers import is_called_from
from trainer_hook.libraries.transformers import exactness
from trainer_hook.libraries.transformers.best_model import BestModel
from trainer_hook.libraries.transformers.callback import callback_class
from trainer_hook.libraries.transformers.callback_states import kept_last, latest_restored
from trainer_hook.libraries.transformers.checkpoint_files import STATE, is_finished, read_state
from trainer_hook.libraries.transformers.driver import TrainerDriver
from trainer_hook.libraries.transformers.epoch_start import EpochStart, used_batches_skipped
from trainer_hook.libraries.transformers.evaluation_workers import seeded_before
from trainer_hook.libraries.transformers.finished import hand_over, training_outcome
from trainer_hook.libraries.transformers.script_saves import ScriptSaves, leave_final
from trainer_hook.libraries.transformers.step_tail import no_second_start, no_step_too_many, unfinished_of
from trainer_hook.libraries.transformers.streams import pass_continued
from trainer_hook.process.log import info, warn
from trainer_hook.process.patching import surrounded
from trainer_hook.process.session import Session, current_session, known_session
from trainer_hook.resuming.resumer import Choice
from trainer_hook.train_call.train_call import TrainCall

_SOURCES = {"store": "from the store", "downloaded": "downloaded from the store before", "local": "still on the volume"}


def activate(trainer_module: Any) -> None:
    """Patch an imported ``transformers.trainer``, and listen for signals before the first ``train()``."""
    process = sys.modules.get("multiprocessing.process")
    # In a child of multiprocessing, a DataLoader worker or a rank, only a call of train() opens the session.
    if process is None or (process.parent_process() is None and not hasattr(process.current_process(), "_inheriting")):
        current_session()
    patch(trainer_module, current_session)


def patch(trainer_module: Any, find_session: Callable[[], Session]) -> None:
    """Wrap ``Trainer.train`` of an imported ``transformers.trainer``.

    ``find_session`` returns this process's session; it opens one in a process that multiprocessing started to train.
    """
    trainer_class = trainer_module.Trainer
    original = trainer_class.train

    @functools.wraps(original)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        session = _session_for(find_session)
        searching = _is_search(args, kwargs)
        if session is not None and searching:
            _report_search()
        if session is None or searching or getattr(self, "_checkpoint_hook", False) or session.is_inner_call():
            return original(self, resume_from_checkpoint, *args, **kwargs)
        self._checkpoint_hook = True
        try:
            ignore_keys = args[1] if len(args) > 1 else kwargs.get("ignore_keys_for_eval")
            return HookedTrain(session, self, resume_from_checkpoint, ignore_keys=ignore_keys).run(
                lambda resume_from: original(self, resume_from, *args, **kwargs)
            )
        finally:
            self._checkpoint_hook = False

    trainer_class.train = train
    if (save_model := getattr(trainer_class, "save_model", None)) is not None:
        trainer_class.save_model = _leaving_final(save_model)


def _leaving_final(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Trainer.save_model``, by which a script may save its model in the folder of our final model."""

    @functools.wraps(original)
    def save_model(self: Any, output_dir: Any = None, _internal_call: bool = False) -> Any:
        session = None if _internal_call else known_session()
        if session is not None and self.is_local_process_zero():
            leave_final(session.settings.dir, Path(output_dir or self.args.output_dir))
        return original(self, output_dir, _internal_call)

    return save_model


def _session_for(find_session: Callable[[], Session]) -> Session | None:
    """Return the session of a ``train()`` call; ``None`` in a forked child, or where it cannot be opened."""
    try:
        session = find_session()
    except Exception as error:
        warn(f"the hook is off: {type(error).__name__}: {error}")
        return None
    return session if os.getpid() == session.pid else None


def _is_search(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this is a trial of a hyperparameter search: trials are separate runs, which the hook does not save."""
    return kwargs.get("trial") is not None or bool(args and args[0] is not None) or _is_in_objective()


def _is_in_objective() -> bool:
    """Whether a study of Optuna calls this: in another pod the call of the same number may have other hyperparameters."""
    return "optuna" in sys.modules and is_called_from("optuna.study.")


@functools.cache
def _report_search() -> None:
    info("hyperparameter search: its trials are left alone, neither saved here nor resumed")


class HookedTrain:
    """One ``train()`` call under the hook."""

    def __init__(self, session: Session, trainer: Any, resume_from: Any, *, ignore_keys: list[str] | None) -> None:
        """Join the other ranks. ``ignore_keys``: ``ignore_keys_for_eval`` of ``train()``."""
        self._session = session
        self._trainer = trainer
        self._resume_from = resume_from
        self._ignore_keys = ignore_keys
        self._driver = TrainerDriver(session, trainer, resume_from)
        self._driver.replace_builtin_jit()
        self._call = call = TrainCall(session, self._driver)
        self._start = EpochStart(trainer, session.settings.dir)
        self._best = BestModel(
            trainer,
            session.settings.dir,
            call.resumer,
            call.consensus.all_agree,
            call.saver.name,
            is_noticed=session.stop.noticed,
            stop_if_noticed=call.stop_if_noticed,
        )

    def run(self, train: Callable[[Any], Any]) -> Any:
        """Return what ``train`` returns, or returned in an earlier pod."""
        call, trainer = self._call, self._trainer
        choice = self._resume()
        with call.loading():
            output = self._finished_output(choice)
        call.load_begins()
        try:
            if output is None:
                output = self._train(train, choice)
                call.saver.save_final(trainer.state.global_step)
            call.end()
        except Exception as error:
            call.failed(error)
            raise
        finally:
            call.close()
        return output

    def _resume(self) -> Choice | None:
        began_s = time.monotonic()
        choice = self._call.resume()
        if choice is not None:
            source = _SOURCES.get(choice.source or "", "")
            info(f"resumes from {choice.name} ({source}{', ' if source else ''}{time.monotonic() - began_s:.1f} s)")
        return choice

    def _train(self, train: Callable[[Any], Any], choice: Choice | None) -> Any:
        trainer, call, tail = self._trainer, self._call, self._driver.tail
        script_saves = ScriptSaves(call, self._driver)
        callback = callback_class()(call, self._driver, script_saves, self._start, functools.partial(self._on_begin, choice))
        trainer.add_callback(callback)
        try:
            with contextlib.ExitStack() as patches:
                patches.enter_context(kept_last(trainer.callback_handler, callback))
                patches.enter_context(self._best.from_store())
                patches.enter_context(
                    surrounded(trainer, "_maybe_log_save_evaluate", during=tail.doing, after=callback.save_what_is_due)
                )
                patches.enter_context(script_saves.watched())
                patches.enter_context(self._start.saved())
                if choice is not None:
                    patches.enter_context(latest_restored(trainer))
                    patches.enter_context(no_second_start(trainer))
                    patches.enter_context(seeded_before(trainer, choice))
                    patches.enter_context(used_batches_skipped())
                    patches.enter_context(no_step_too_many(trainer))
                    patches.enter_context(pass_continued(trainer, choice))
                    patches.enter_context(exactness.reported(trainer, choice.step_in_call))
                own = self._resume_from if call.script_choice_stands else None
                return train(own if choice is None else str(choice.path))
        except RuntimeError as error:
            if not call.was_worker_killed(error):
                raise
            call.stop()
        finally:
            call.saver.end()
            trainer.remove_callback(callback)
            vars(trainer).pop("_load_rng_state", None)

    def _on_begin(self, choice: Choice | None) -> None:
        self._driver.begin()
        self._call.begin()
        self._start.training_begins(choice)
        if choice is None:
            return
        self._best.expect_on_volume()
        self._driver.tail.catch_up(choice.meta, choice.path, ignore_keys=self._ignore_keys)
        self._start.restore_between_epochs()

    def _finished_output(self, choice: Choice | None) -> Any:
        """Return the outcome of a run that had finished in an earlier pod; ``None``: there is something left to train."""
        if choice is None:
            return None
        trainer, call = self._trainer, self._call
        args, state = trainer.args, read_state(choice.path)
        if not is_finished(state, choice.meta, max_steps=args.max_steps, epochs=args.num_train_epochs):
            return None
        if getattr(trainer, "is_deepspeed_enabled", False) or getattr(trainer, "is_fsdp_enabled", False):
            return None  # their weights are loaded only on the way into training
        from transformers.trainer_callback import TrainerState
        from transformers.trainer_utils import TrainOutput

        final = call.resumer.final(self._session.train_calls)
        if final is None and unfinished_of(choice.meta):
            return None
        # Training may have ended with an earlier, better model than the last checkpoint's: final/ holds that one.
        ended = final or choice.path
        trainer._load_from_checkpoint(str(ended))
        trainer.state = TrainerState.load_from_json(str(ended / STATE))
        hand_over(trainer, choice, call.resumer)
        info(f"training had finished at {choice.name}: {ended.name} is loaded, nothing is left to train")
        if final is None:
            self._end_with_best()
            call.saver.save_final(trainer.state.global_step)
        return TrainOutput(trainer.state.global_step, *training_outcome(read_state(ended)))

    def _end_with_best(self) -> None:
        trainer = self._trainer
        self._best.expect_on_volume()
        if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
            with self._best.from_store():
                trainer._load_best_model()
