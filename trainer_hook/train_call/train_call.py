"""One ``train()`` call from the patched method to its return."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from trainer_hook.process.earlier_scripts import last_ended
from trainer_hook.process.log import info, warn
from trainer_hook.process.preemption import exit_preempted
from trainer_hook.process.session import Session
from trainer_hook.process.training_progress import TrainingProgress
from trainer_hook.resuming.resumer import CannotResume, Choice, Resumer
from trainer_hook.saving.async_save import prepare
from trainer_hook.saving.failed_saves import tell_unreadable
from trainer_hook.saving.step_monitor import Due, StepMonitor
from trainer_hook.saving.step_saver import StepSaver
from trainer_hook.train_call.driver import Driver, ScriptCheckpoint

MOST_TOLD = 300
"""Maximum number of characters of a library's error in a line of the log; the traceback below it has all."""
NOT_LOADED_HINT = (
    "If the cause passes, start again. If the model, its settings or a library have changed, use those that saved it, or "
    "another CKPT_STORE prefix. 'checkpoint-sidecar verify' says whether the store has what was saved; 'checkpoint-sidecar rm' "
    "deletes it there, and the next pod resumes from an older one"
)


class TrainCall:
    """Collective: every rank calls each method at the same point of training.

    A driver calls, in this order: the constructor, ``resume``, ``load_begins`` if the library loads by itself, ``begin``; for
    each step ``step_ended`` and ``save_pending``; then ``finish``, ``end``; and ``close`` in any case.
    """

    def __init__(self, session: Session, driver: Driver) -> None:
        """Join the other ranks. Raises ``SystemExit``: a rank has its termination notice already."""
        session.outcome = None
        self.session = session
        self.consensus = session.join_again()
        if session.earlier is None:
            session.count_on_from(
                self.consensus.from_rank_0(last_ended(session.settings.dir) if self.consensus.world.rank == 0 else None)
            )
        if not self.consensus.all_agree(session.stop.notice_at_s is None):
            exit_preempted(session, 0)
        self._driver = driver
        self.resumer = Resumer(
            session.settings,
            session.client,
            self.consensus,
            missing=driver.missing_files,
            reads_all=driver.reads_all(),
            check=driver.check,
        )
        self.saver = StepSaver(session, driver, driver.background())
        self.monitor = StepMonitor(session)
        self.script_choice_stands = True
        """Whether the script's own choice may be used where ``resume`` returns ``None``; else training starts from scratch."""
        self._is_prepared = False
        self._pending: str | None = None
        self._loads: Choice | None = None
        """The checkpoint that is loaded between ``resume`` and ``begin``."""

    def resume(self) -> Choice | None:
        """Choose the checkpoint to resume from; ``None``: the script's own choice stands, or training starts from scratch.

        Raises ``CannotResume``: as ``Resumer.choose``; also where the ranks' own checkpoints differ and there is no other.
        """
        session = self.session
        choice = self.resumer.choose(session.train_calls)
        named = self._script_checkpoint(choice)
        if choice is None:
            info("no checkpoint to resume from" + (f": {named.path} is used" if named else ""))
            return None
        # At the same step our checkpoint is used: it also records whether training had ended, and an unfinished step.
        if named is not None and named.step > choice.step_in_call:
            info(f"continues from {named.path} (step {named.step}), as the script asks: {choice.name} is not as far")
            return None
        if session.is_first_call:
            session.base_step = choice.base_step
        session.continues_from(choice.name, attempt=choice.attempt)
        self._loads = choice
        return choice

    def _script_checkpoint(self, choice: Choice | None) -> ScriptCheckpoint | None:
        """Return the checkpoint that the script names if all ranks have the same one. Each looks on its own disk."""
        try:
            named = self._driver.script_checkpoint(choice, self.resumer)
        except OSError as error:
            warn(f"the script's own checkpoint cannot be read: {error}")
            named = None
        mine = None if named is None else (Path(named.path).name, named.step)
        first = self.consensus.from_rank_0(mine)
        # One that the script writes on the volume has a marker, and may be of another attempt on another node.
        is_same = first is None or self.resumer.is_same_on_all(None if named is None else Path(named.path))
        self.script_choice_stands = self.consensus.all_agree(mine == first and is_same)
        if self.script_choice_stands:
            return named
        here = "none" if named is None else f"{named.path} (step {named.step})"
        differs = f"the checkpoint that the script asks for is not the same on every rank (here: {here})"
        if choice is not None:
            warn(f"{differs}: {choice.name} is used")
            return None
        if self.session.settings.fail_without_store:
            warn(f"exits 1 because CKPT_ON_STORE_FAILURE=fail: {differs}")
            raise CannotResume(1)
        warn(f"TRAINING STARTS FROM SCRATCH: {differs}, and there is no other")
        return None

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Surround loading that is outside of what ``failed`` is called for: an error is told, and raised."""
        try:
            yield
        except Exception as error:
            self._tell_not_loaded(error)
            raise

    def _tell_not_loaded(self, error: Exception) -> None:
        if (choice := self._loads) is not None:
            self._loads = None
            warn(f"{choice.name} was not loaded ({type(error).__name__}: {str(error)[:MOST_TOLD]}). {NOT_LOADED_HINT}")

    def load_begins(self) -> None:
        """The library loads the checkpoint now: SIGTERM is deferred only where other ranks may wait for this one meanwhile."""
        if self.consensus.world.size > 1:
            self.defer_signals()

    def defer_signals(self) -> None:
        """Defer SIGTERM to the end of a step from now on. May be repeated."""
        self.session.call_runs = True
        self.session.stop.defer()

    def begin(self) -> None:
        """Begin training after step ``Driver.global_step``. Raises ``SystemExit``: a rank has its termination notice."""
        self.defer_signals()
        self._loads = None
        self.session.measure = self._progress
        self.monitor.begin(self._driver.global_step)
        if self.monitor.is_noticed():  # nothing is saved: the library has not restored all of its state yet
            self.monitor.stop(self._driver.global_step, lambda: True)

    def stop_if_noticed(self) -> None:
        """Stop where the state is that of the last finished step, if a rank has its termination notice. Collective."""
        if self.monitor.is_noticed():
            self.stop()

    def _progress(self) -> TrainingProgress:
        progress = self._driver.progress()
        total = progress.total_steps
        return replace(progress, total_steps=None if total is None else self.session.base_step + total)

    def step_ended(self) -> None:
        """Count a step: exit if the ranks agreed to stop, note a save that is due."""
        if not self._is_prepared:
            self._is_prepared = True
            tell_unreadable(self._driver.unreadable)
            if self.saver.background is not None:
                prepare(self.saver.background, self._driver.large_objects())
        self.act_on(self.monitor.at_step(self._driver.global_step))

    def act_on(self, due: Due) -> None:
        """Stop or note a save, as the ranks agreed."""
        if due.stop:
            self.stop()
        self.request(due.reason)

    def request(self, reason: str | None) -> None:
        """Request a save at the next ``save_pending``. ``manual`` takes precedence: a caller of the API waits for it."""
        if reason == "manual" or self._pending is None:
            self._pending = reason or self._pending

    def save_pending(self, meta: Mapping[str, Any] | None = None) -> None:
        """Save if that is due, and stop there if a notice came meanwhile. ``meta`` is added to the marker's."""
        reason, self._pending = self._pending, None
        if reason is not None:
            self.save(reason, meta)
            # Not after one more step and one more save: there may be no time for a second one.
            self.act_on(self.monitor.inside("save"))

    def save(self, reason: str, meta: Mapping[str, Any] | None = None) -> bool:
        """Save now. Returns whether this rank's part is saved; false before the first step."""
        step = self._driver.global_step
        if not step:
            return False
        self.saver.step_seconds = self.monitor.step_seconds
        saved = self.saver.save(step, reason, meta)
        self.monitor.saved(step, ok=saved)
        return saved

    def stop(self) -> NoReturn:
        """Save just in time and end this process."""
        self.monitor.stop(self._driver.global_step, self._save_just_in_time)

    def _save_just_in_time(self) -> bool:
        meta = self._driver.interrupt()
        self.saver.make_room()
        self.saver.step_seconds = self.monitor.step_seconds
        return self.saver.save_just_in_time(self._driver.global_step, meta)

    def was_worker_killed(self, error: RuntimeError) -> bool:
        """Whether fetching a batch failed because a SIGTERM to the process group ended a DataLoader worker."""
        return self.session.stop.notice_at_s is not None and "DataLoader worker" in str(error)

    def finish(self) -> None:
        """Training has ended by itself: save its last step and the final model."""
        self.save("periodic")
        self.saver.settle()
        self.saver.save_final(self._driver.global_step)

    def end(self) -> None:
        """End the call after training. Raises ``SystemExit``: a rank has got a termination notice meanwhile."""
        session, step = self.session, self._driver.global_step
        if not self.consensus.all_agree(session.stop.notice_at_s is None or not session.settings.jit):
            exit_preempted(session, step)
        self.close()
        session.tell_state("running", session.base_step + step)
        session.call_ended(step)
        session.stop.catch_up()

    def failed(self, error: BaseException) -> None:
        """End the call after an error. Raises ``SystemExit`` instead of the error if a signal came meanwhile.

        The signal may have caused the error, because other processes of the container have got it, too. A script that catches
        the error would go on as if there had been no signal.
        """
        self.close()
        if isinstance(error, Exception):
            self._tell_not_loaded(error)
        if isinstance(error, Exception) and self.session.stop.is_due:
            warn(f"training ended with an error after the termination notice ({type(error).__name__}: {error})")
            self.session.stop.catch_up()

    def close(self) -> None:
        """Wait for an asynchronous save and free its memory; SIGTERM ends the process at once again. May be repeated."""
        self.saver.end()
        self.session.call_runs = False
        self.session.measure = None
        self.session.stop.end_deferral()
