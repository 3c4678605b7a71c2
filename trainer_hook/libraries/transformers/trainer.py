"""Hugging Face Trainer: ``train()`` is wrapped and a callback added; the script's arguments and own saves stay as they are."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from typing import Any

from trainer_hook.libraries.transformers import exactness
from trainer_hook.libraries.transformers.best_model import brought_at_end, is_new_best, look_on_volume
from trainer_hook.libraries.transformers.finished import leave_to_next_call, take_over, training_outcome
from trainer_hook.libraries.transformers.saver import Saver
from trainer_hook.libraries.transformers.step_tail import StepTail, no_step_too_many, own_folder, unfinished_of
from trainer_hook.libraries.transformers.wrapping import around, before_own_saves, named_by_script
from trainer_hook.process.log import say, warn
from trainer_hook.process.session import Session
from trainer_hook.resuming.resumer import STATE, Choice, Resumer, is_finished, read_state
from trainer_hook.saving.step_monitor import Due, StepMonitor, leave


def patch(trainer_module: Any, current_session: Callable[[], Session]) -> None:
    """Wrap ``Trainer.train`` of an imported ``transformers.trainer``.

    Args:
        trainer_module: The module.
        current_session: Gives this process's session; opens it in a process that multiprocessing started to train.
    """
    trainer_class = trainer_module.Trainer
    original = trainer_class.train

    @functools.wraps(original)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        session = _session_for(current_session)
        searching = _is_search(args, kwargs)
        if session is not None and searching:
            _tell_of_search()
        if session is None or searching or getattr(self, "_checkpoint_hook", False):
            return original(self, resume_from_checkpoint, *args, **kwargs)
        self._checkpoint_hook = True
        try:
            return _Call(session, self, trainer_module, ignore_keys=_third(args, kwargs)).run(
                lambda resume: original(self, resume, *args, **kwargs), resume_from_checkpoint
            )
        finally:
            self._checkpoint_hook = False

    trainer_class.train = train


def _session_for(current_session: Callable[[], Session]) -> Session | None:
    """Return the session that a ``train()`` call belongs to; ``None`` where it is left alone, as in forked children."""
    try:
        session = current_session()
    except Exception as error:
        warn(f"the hook is off: {type(error).__name__}: {error}")
        return None
    return session if os.getpid() == session.pid else None


def _is_search(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this is a trial of a hyperparameter search: those are not one run, and are left alone."""
    return kwargs.get("trial") is not None or bool(args and args[0] is not None)


@functools.cache
def _tell_of_search() -> None:
    say("hyperparameter search: its trials are left alone, neither saved here nor resumed")


def _third(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("ignore_keys_for_eval")


def _reads_all(trainer: Any) -> bool:
    """Whether DeepSpeed is told to read the files of all ranks."""
    if not getattr(trainer, "is_deepspeed_enabled", False):
        return False
    config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    elastic = config.get("zero_optimization", {}).get("elastic_checkpoint")
    return bool(elastic or config.get("checkpoint", {}).get("load_universal"))


class _Call:
    """One ``train()`` call."""

    def __init__(self, session: Session, trainer: Any, module: Any, *, ignore_keys: list[str] | None) -> None:
        self._session = session
        self._trainer = trainer
        self._agreement = session.join()
        self._resumer = Resumer(session.settings, session.client, self._agreement, reads_all=_reads_all(trainer))
        self._saver = Saver(session, trainer)
        self._callback = _callback_class(module)(session, trainer, self._saver)
        self._ignore_keys = ignore_keys

    def run(self, train: Callable[[Any], Any], theirs: Any) -> Any:
        session, trainer = self._session, self._trainer
        session.outcome = None
        self._replace_builtin_jit()
        if not self._agreement.all_agree(session.stop.told_at_s is None):
            leave(session, 0)
        choice = self._choose(theirs)
        output = self._finished_output(choice)
        with session.stop.training():
            if output is None:
                output = self._train(train, theirs, choice)
                self._saver.save_final(trainer.state.global_step)
            if not self._agreement.all_agree(session.stop.told_at_s is None or not session.settings.jit):
                leave(session, trainer.state.global_step)
        session.tell_state("running", session.base_step + trainer.state.global_step)
        session.base_step += trainer.state.global_step
        session.train_calls += 1
        session.outcome = "succeeded"
        return output

    def _train(self, train: Callable[[Any], Any], theirs: Any, choice: Choice | None) -> Any:
        trainer, callback = self._trainer, self._callback
        volume = self._session.settings.dir
        if choice is None:
            take_over(trainer, self._resumer)
        else:
            callback.resumed = functools.partial(self._resumed, choice)
        trainer.add_callback(callback)
        try:
            with (
                brought_at_end(trainer, volume, self._resumer, self._agreement.all_agree),
                around(trainer, "_maybe_log_save_evaluate", callback.tail.doing, then=callback.save_what_is_due),
                before_own_saves(trainer, self._saver),
                contextlib.nullcontext() if choice is None else no_step_too_many(trainer),
                contextlib.nullcontext() if choice is None else exactness.told(trainer, choice.step_in_call),
            ):
                return train(theirs if choice is None else str(choice.path))
        except RuntimeError as error:
            # The group's SIGTERM ends DataLoader workers, too: fetching the next batch fails, the last step stands.
            if self._session.stop.told_at_s is None or "DataLoader worker" not in str(error):
                raise
            callback.stop(trainer.model_wrapped, trainer.state.global_step)
        finally:
            self._saver.end()
            trainer.remove_callback(callback)
            vars(trainer).pop("_load_rng_state", None)

    def _resumed(self, choice: Choice) -> None:
        """Runs when training begins again, before the first batch."""
        look_on_volume(self._trainer, self._session.settings.dir, self._saver.name)
        if left := unfinished_of(choice.meta):
            self._callback.tail.catch_up(left, choice.path, ignore_keys=self._ignore_keys)

    def _replace_builtin_jit(self) -> None:
        if not self._session.settings.jit:
            return
        handler = self._trainer.callback_handler
        for callback in [c for c in handler.callbacks if type(c).__name__ == "JITCheckpointCallback"]:
            handler.remove_callback(callback)
            self._session.stop.install_again()
            say("enable_jit_checkpoint is replaced by this system's own just-in-time checkpoint")

    def _choose(self, theirs: Any) -> Choice | None:
        began_s = time.monotonic()
        choice = self._resumer.choose(self._session.train_calls)
        named = named_by_script(self._trainer, theirs)
        if named is not None and (lacking := self._resumer.lacks(named)):
            what = f"{named} has no {', '.join(lacking)}; was it saved with save_only_model? It cannot be resumed exactly"
            if choice is None:
                warn(f"{what}: Trainer takes its weights and begins the rest anew")
            else:
                say(f"{what}: {choice.name} is used")
                named = None
        if choice is not None and named is not None:
            given = read_state(named).get("global_step", 0)
            if given >= choice.step_in_call:
                say(f"continues from {named} (step {given}), as the script asks: {choice.name} is not further")
                return None
        if choice is None:
            say("no checkpoint to resume from" + (f": {theirs} is used" if isinstance(theirs, str) else ""))
            return None
        if choice.base_step != self._session.base_step and self._session.train_calls == 0:
            self._session.base_step = choice.base_step
        self._session.continues_from(choice.name, attempt=choice.attempt)
        said = {"store": "from the store", "downloaded": "downloaded from the store before", "local": "still on the volume"}
        where = said.get(choice.source or "", "")
        say(f"resumes from {choice.name} ({where}{', ' if where else ''}{time.monotonic() - began_s:.1f} s)")
        return choice

    def _finished_output(self, choice: Choice | None) -> Any:
        """Return the outcome of a run that had already finished; ``None`` if there is something left to train."""
        if choice is None:
            return None
        args, state = self._trainer.args, read_state(choice.path)
        if not is_finished(state, choice.meta, max_steps=args.max_steps, epochs=args.num_train_epochs):
            return None
        if getattr(self._trainer, "is_deepspeed_enabled", False) or getattr(self._trainer, "is_fsdp_enabled", False):
            return None  # their weights are loaded only on the way into training
        from transformers.trainer_callback import TrainerState
        from transformers.trainer_utils import TrainOutput

        session = self._session
        final = self._resumer.final(session.train_calls)
        if final is None and unfinished_of(choice.meta):
            return None
        # What training ended with may be an earlier, better model than the last checkpoint's: final/ is what it ended with.
        ended = final or choice.path
        self._trainer._load_from_checkpoint(str(ended))
        self._trainer.state = TrainerState.load_from_json(str(ended / STATE))
        leave_to_next_call(self._trainer, choice)
        say(f"training had finished at {choice.name}: {ended.name} is loaded, nothing is left to train")
        if final is None:
            self._end_with_best()
            self._saver.save_final(self._trainer.state.global_step)
        return TrainOutput(self._trainer.state.global_step, *training_outcome(read_state(ended)))

    def _end_with_best(self) -> None:
        trainer, volume = self._trainer, self._session.settings.dir
        look_on_volume(trainer, volume, self._saver.name)
        if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
            with brought_at_end(trainer, volume, self._resumer, self._agreement.all_agree):
                trainer._load_best_model()


@functools.cache
def _callback_class(module: Any) -> type:
    from transformers.trainer_callback import TrainerCallback

    class CheckpointHook(TrainerCallback):  # type: ignore[misc]
        """Saves when the schedule, a request or a signal says so, at the end of a step: the exact point to resume from."""

        def __init__(self, session: Session, trainer: Any, saver: Saver) -> None:
            self._trainer = trainer
            self._saver = saver
            self._pace = StepMonitor(session)
            self._due: str | None = None
            self._is_ready = False
            self.tail = StepTail(trainer)
            self.resumed: Callable[[], None] = lambda: None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._saver.begin()
            self._pace.begin(state.global_step)
            self.resumed()

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.tail.step_begins()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.tail.step_ends(control)
            if not self._is_ready:
                self._is_ready = True
                self._saver.get_ready()
            due = self._pace.at_step(state.global_step)
            self._saver.step_seconds = self._pace.step_seconds
            self._follow(due, kwargs.get("model"), state.global_step)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.tail.epoch_ends(control)
            if self._pace.schedule.due_at_epoch_end():
                self._due = self._due or "periodic"

        def save_what_is_due(self) -> None:
            """Runs after the evaluation and the script's own save of a step: both may draw random numbers."""
            if self.tail.goes_on:  # the epoch's own evaluation is still to come
                return
            self.tail.done()
            state, control = self._trainer.state, self._trainer.control
            ends = control.should_training_stop
            reason, self._due = self._due or ("periodic" if ends else None), None
            if reason is not None and state.global_step:
                early = bool(ends and state.global_step < state.max_steps)
                saved = self._saver.save(self._trainer.model_wrapped, state.global_step, reason, stopped_early=early)
                self._pace.saved(state.global_step, ok=saved)

        def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # Inside an evaluation the last finished step is still the point to resume from.
            if self._trainer.is_in_train:
                due = self._pace.inside("evaluate")
                if due.stop and not self.tail.is_doing:
                    say("a callback evaluates at this instant: the random numbers of a resume will be others")
                self._follow(due, kwargs.get("model"), state.global_step)

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._saver.publish_own(own_folder(self._trainer), state.global_step)
            if is_new_best(self._trainer):
                self._due = self._due or "periodic"

        def _follow(self, due: Due, model: Any, step: int) -> None:
            if due.stop:
                self.stop(model, step)
            if due.reason is not None:
                self._due = due.reason if due.reason == "manual" else self._due or due.reason

        def stop(self, model: Any, step: int) -> None:
            """Save just in time and end this process."""
            model = model if model is not None else self._trainer.model
            self._pace.stop(step, functools.partial(self._save_just_in_time, model, step))

        def _save_just_in_time(self, model: Any, step: int) -> bool:
            self.tail.rewind()
            self._saver.unfinished = self.tail.unfinished
            self._saver.make_room()
            return self._saver.save(model, step, "jit")

    return CheckpointHook
