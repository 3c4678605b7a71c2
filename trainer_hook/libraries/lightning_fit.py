"""One ``fit()`` of a Lightning Trainer: where it continues, when it saves, and what is added to Lightning's own checkpoint."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trainer_hook.libraries.lightning_validation import UNFINISHED, Validation
from trainer_hook.loops import randomness, state_files
from trainer_hook.loops.loading import Pass, is_stateful, nowhere
from trainer_hook.loops.loop import PROGRESS, missing_from, rank_file
from trainer_hook.process.log import say
from trainer_hook.process.session import Session
from trainer_hook.resuming.resumer import Choice, Resumer
from trainer_hook.saving.async_save import background_for, prepare
from trainer_hook.saving.step_monitor import StepMonitor, leave
from trainer_hook.saving.step_saver import StepSaver

CHECKPOINT = "lightning.ckpt"


class Fit:
    """Every method is called on every rank at the same point of the loops."""

    def __init__(self, session: Session, trainer: Any) -> None:
        self.session = session
        self.trainer = trainer
        session.outcome = None
        agreement = session.join()
        self._world = agreement.world
        if not agreement.all_agree(session.stop.told_at_s is None):
            leave(session, 0)
        self._background = background_for(session.settings, _obstacle(trainer.strategy))
        self._saver = _FitSaver(session, self)
        self._pace = StepMonitor(session)
        self._pass: Pass | None = None
        self._resumed: dict[str, Any] | None = None
        self._batch = 0
        self._is_ready = False
        self._validation = Validation(trainer, agreement)
        self._unfinished: list[str] = []
        """What a save just in time leaves undone; of what is resumed from, until it is done."""
        self._asked: str | None = None
        """Reason of a save that became due in a validation."""

    @property
    def _alone(self) -> bool:
        return self._world.local_size == 1

    def choose(self, theirs: Any) -> Path | None:
        """Return Lightning's file in the checkpoint to continue from; ``None``: what the script says stands."""
        session = self.session
        choice = Resumer(session.settings, session.client, session.join(), missing=_missing).choose(session.train_calls)
        if choice is None:
            say("no checkpoint to resume from" + (f": {theirs} is used" if theirs else ""))
            return None
        if theirs and (_step_of_file(theirs) or -1) >= choice.step_in_call:
            say(f"continues from {theirs}, as the script asks: {choice.name} is not further")
            return None
        if session.train_calls == 0:
            session.base_step = choice.base_step
        session.continues_from(choice.name, attempt=choice.attempt)
        self._read_place(choice)
        return choice.path / CHECKPOINT

    def _read_place(self, choice: Choice) -> None:
        progress = json.loads((choice.path / PROGRESS).read_text())
        self._batch = int(progress["batch"])
        if progress["world_size"] == self._world.size:
            self._resumed = state_files.read_pt(choice.path / rank_file(self._world.rank))
            self._unfinished = list(progress.get("unfinished", []))
        say(f"resumes from {choice.name} (epoch {progress['epoch']}, batch {self._batch})")

    def restored(self) -> None:
        """Lightning has loaded its state."""
        if self._resumed is not None and not self._batch:
            self._end_restart()  # between epochs: with max_steps Lightning would go on in the epoch that has ended
        self._pace.begin(self.trainer.global_step)

    def batches(self, loader: Any) -> Iterator[Any]:
        """Return the batches of a pass over the training data."""
        self._pass = Pass(loader, alone=self._alone)
        if self._resumed is None:
            return self._pass.skip(self._batch) if self._batch and not _keep_their_place(loader) else self._pass.begin()
        if not self._batch:
            return self._pass.begin_after(self._resumed)
        for part in loader.flattened:
            sampler: Any = getattr(part, "sampler", None)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.trainer.current_epoch)
        return self._pass.resume(self._resumed, 0 if _keep_their_place(loader) else self._batch)

    def before_epoch(self) -> None:
        """An epoch begins, or one that was interrupted goes on."""
        if self._resumed is not None and not self._batch:
            randomness.restore(self._resumed["now"], alone=self._alone)

    def before_pass(self, data_fetcher: Any) -> None:
        """The first batch of a pass is about to be fetched."""
        if self._resumed is not None and not self._batch and self.trainer.current_epoch > 0:
            iter(data_fetcher)  # Lightning would use the pass that it began before the epoch did

    def in_pass(self, data_fetcher: Any) -> None:
        """The pass has been begun."""
        resumed, batch, unfinished = self._resumed, self._batch, self._unfinished
        self._resumed, self._batch, self._unfinished = None, 0, []
        if resumed is None or not batch:
            return
        self._end_restart()  # Lightning would pass over what it does after the next batch: schedulers, a validation
        randomness.restore(resumed["now"], alone=self._alone)
        if UNFINISHED in unfinished:
            say("does first what was left: the validation")
            self._validation.catch_up(resumed.get("metrics", {}), data_fetcher)

    def _end_restart(self) -> None:
        loop = self.trainer.fit_loop
        loop._restarting = False
        loop.epoch_loop.restarting = False

    @contextlib.contextmanager
    def validation(self) -> Iterator[None]:
        """While a validation runs."""
        if not self.trainer.sanity_checking:
            self._validation.begin(self._place())
        yield
        self._validation.end()  # not after an error: nothing is saved then

    def in_validation(self) -> None:
        """A batch of a validation is done. Nothing has changed of what was trained: it is still the point to resume from."""
        if not self._validation.can_stop:
            return
        due = self._pace.inside("validate")
        self._asked = due.reason or self._asked
        if due.stop:
            self._validation.take_back()
            self._batch = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
            self._unfinished = [UNFINISHED]
            self._pace.stop(self.trainer.global_step, self._save_just_in_time)

    def after_batch(self) -> None:
        """A batch has been used, and a validation run if one was due."""
        loop = self.trainer.fit_loop.epoch_loop
        if loop._should_accumulate() or loop._is_training_done:
            return
        self._save_what_is_due(loop.batch_progress.current.ready, epoch_ends=False)

    def after_epoch(self) -> None:
        """An epoch has ended."""
        self._save_what_is_due(0, epoch_ends=True)

    def _get_ready(self) -> None:
        if not self._is_ready and self._background is not None:
            self._is_ready, trainer = True, self.trainer
            prepare(self._background, [trainer.lightning_module, *trainer.optimizers] if trainer.is_global_zero else [])

    def _save_what_is_due(self, batch: int, *, epoch_ends: bool) -> None:
        self._get_ready()
        self._batch = batch
        step = self.trainer.global_step
        due = self._pace.at_step(step)
        if due.stop:
            self._pace.stop(step, self._save_just_in_time)
        asked, self._asked = self._asked, None
        reason = due.reason or asked or ("periodic" if epoch_ends and self._pace.schedule.due_at_epoch_end() else None)
        if reason is not None and step:
            self._save(reason)
        self._batch = 0

    def _save(self, reason: str) -> None:
        self._saver.step_seconds = self._pace.step_seconds
        saved = self._saver.save(None, self.trainer.global_step, reason)
        self._pace.saved(self.trainer.global_step, ok=saved)

    def _save_just_in_time(self) -> bool:
        self._saver.make_room()
        return self._saver.save(None, self.trainer.global_step, "jit")

    def trained(self) -> None:
        """Training has ended by itself."""
        self._save("periodic")
        self._saver.settle()
        self._saver.save_final(self.trainer.global_step)

    def close(self) -> None:
        """It is over, however it ended."""
        self._saver.end()

    def ended(self) -> None:
        """``fit()`` returns."""
        session, step = self.session, int(self.trainer.global_step)
        if not session.join().all_agree(session.stop.told_at_s is None or not session.settings.jit):
            leave(session, step)
        session.tell_state("running", session.base_step + step)
        session.base_step += step
        session.train_calls += 1
        session.outcome = "succeeded"

    def write(self, folder: Path) -> None:
        """Write everything that a resume needs. Collective."""
        folder.mkdir(parents=True, exist_ok=True)
        with self._plain_files():
            self.trainer.save_checkpoint(folder / CHECKPOINT, weights_only=False)  # all of it
        state_files.write_pt(self._validation.before or self._place(), folder / rank_file(self._world.rank))
        if self._world.rank == 0:
            where = {"step": self.trainer.global_step, "epoch": self.trainer.current_epoch, "batch": self._batch}
            if self._unfinished:
                where["unfinished"] = self._unfinished
            (folder / PROGRESS).write_text(json.dumps(where | {"world_size": self._world.size}) + "\n")

    def _place(self) -> dict[str, Any]:
        return nowhere(alone=self._alone) if self._pass is None else self._pass.state()

    def write_final(self, folder: Path) -> None:
        """Write the model's weights. Collective."""
        weights = self.trainer.strategy.lightning_module_state_dict()
        sharded = any(type(value) is not torch.Tensor for value in weights.values())
        state = ({}, {"model": weights}) if sharded else ({"model": weights}, {})
        state_files.write(state, folder, rank=self._world.rank, group=self.session.join().group)

    @contextlib.contextmanager
    def _plain_files(self) -> Iterator[None]:
        """Save with a plain writer: that of the script may still write when it returns, or write elsewhere."""
        strategy = self.trainer.strategy
        before = strategy._checkpoint_io
        strategy._checkpoint_io = None if _obstacle(strategy) else _PlainFile()
        try:
            yield
        finally:
            strategy._checkpoint_io = before


class _PlainFile:
    """A CheckpointIO that needs no memory for the whole file, as Lightning's own does, and whose write can be put off."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        torch.save(checkpoint, path)


def _obstacle(strategy: Any) -> str | None:
    """Return which strategy it is that writes files of its own, if it does: of sharded state, by all ranks together."""
    writes = next(kind for kind in type(strategy).__mro__ if "save_checkpoint" in vars(kind))
    return None if writes.__name__ == "Strategy" else type(strategy).__name__


def _keep_their_place(loader: Any) -> bool:
    """Whether Lightning itself restores the place in the data."""
    return all(is_stateful(part) for part in loader.flattened)


def _missing(files: Any, **ranks: Any) -> list[str]:
    # A sharded strategy writes a folder.
    there = any(name == CHECKPOINT or name.startswith(f"{CHECKPOINT}/") for name in files)
    return missing_from(files, **ranks) + ([] if there else [CHECKPOINT])


def _step_of_file(path: Any) -> int | None:
    try:
        return int(torch.load(path, map_location="cpu", mmap=True, weights_only=True)["global_step"])
    except Exception:  # whatever it is: ours is at least complete
        return None


class _FitSaver(StepSaver):
    def __init__(self, session: Session, fit: Fit) -> None:
        super().__init__(session, fit._background)
        self._fit = fit

    def _write(self, model: Any, global_step: int) -> None:
        self._fit.write(self._volume / self.name(global_step))

    def _write_final(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._fit.write_final(folder)
