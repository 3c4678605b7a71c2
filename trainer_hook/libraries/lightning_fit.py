"""One ``fit()`` of a Lightning Trainer as a driver: Lightning's own checkpoint, with the position in the data added."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer_hook.asynchronous.background import Background
from trainer_hook.libraries import lightning_state
from trainer_hook.libraries.lightning_validation import UNFINISHED, Validation
from trainer_hook.loops import randomness, state_files
from trainer_hook.loops.loading import Pass, is_stateful, outside_pass
from trainer_hook.loops.loop import missing_from, rank_file
from trainer_hook.loops.position import PROGRESS, read_position
from trainer_hook.process.log import info
from trainer_hook.process.patching import replaced
from trainer_hook.process.session import Session
from trainer_hook.process.training_progress import TrainingProgress
from trainer_hook.resuming.resumer import Choice, Resumer
from trainer_hook.saving.async_save import background_for
from trainer_hook.saving.readable import unreadable
from trainer_hook.train_call.driver import Driver, ScriptCheckpoint
from trainer_hook.train_call.train_call import TrainCall

CHECKPOINT = "lightning.ckpt"
_SAVE_BARRIER = "Trainer.save_checkpoint"
"""Lightning's name of the barrier at the end of a save."""


class Fit(Driver):
    """Every method is called on every rank at the same point of the loops."""

    def __init__(self, session: Session, trainer: Any) -> None:
        self.trainer = trainer
        self._session = session
        self._pass: Pass | None = None
        self._resumed: dict[str, Any] | None = None
        self._batch = 0
        self._ckpt_path: Any = None
        self._unfinished: list[str] = []
        """Unfinished parts of the step: of the just-in-time save, or of the checkpoint that is resumed from."""
        self._continued = contextlib.ExitStack()
        """Until the epoch ends in which this run has resumed."""
        self.call = TrainCall(session, self)
        self._world = self.call.consensus.world
        self._validation = Validation(trainer, self.call.consensus)

    @property
    def global_step(self) -> int:
        """As ``Driver.global_step``."""
        return int(self.trainer.global_step)

    def progress(self) -> TrainingProgress:
        """As ``Driver.progress``; Lightning's loss may be on a GPU."""
        trainer = self.trainer
        if trainer.max_steps > 0:
            return TrainingProgress(int(trainer.max_steps))
        batches, epochs = trainer.num_training_batches, trainer.max_epochs or 0
        if epochs <= 0 or not math.isfinite(batches) or len(trainer.optimizers) != 1:
            return TrainingProgress()
        return TrainingProgress(epochs * math.ceil(batches / trainer.accumulate_grad_batches))

    def missing_files(self, files: Mapping[str, int], **ranks: Any) -> list[str]:
        """As ``Driver.missing_files``. A sharded strategy writes a folder instead of a file."""
        is_there = any(name == CHECKPOINT or name.startswith(f"{CHECKPOINT}/") for name in files)
        return missing_from(files, **ranks) + ([] if is_there else [CHECKPOINT])

    def check(self, folder: Path) -> None:
        """As ``Driver.check``."""
        read_position(folder)

    def background(self) -> Background | None:
        """As ``Driver.background``."""
        return background_for(self._session.settings, _obstacle(self.trainer.strategy))

    def large_objects(self) -> Sequence[Any]:
        """As ``Driver.large_objects``."""
        trainer = self.trainer
        return [trainer.lightning_module, *trainer.optimizers] if trainer.is_global_zero else []

    def script_checkpoint(self, choice: Choice | None, resumer: Resumer) -> ScriptCheckpoint | None:
        """As ``Driver.script_checkpoint``."""
        if not self._ckpt_path:
            return None
        is_compared = choice is not None or self._world.size > 1
        return ScriptCheckpoint(self._ckpt_path, _step_of_file(self._ckpt_path) if is_compared else -1)

    @property
    def _all_gpus(self) -> bool:
        return self._world.local_size == 1

    def choose(self, ckpt_path: Any) -> Path | None:
        """Return Lightning's file in the checkpoint to resume from; ``None``: the script's ``ckpt_path`` stands."""
        self._ckpt_path = ckpt_path
        choice = self.call.resume()
        self.call.load_begins()
        if choice is None:
            return None
        self._read_position(choice)
        return choice.path / CHECKPOINT

    def _read_position(self, choice: Choice) -> None:
        progress = read_position(choice.path)
        self._batch = progress["batch"]
        if progress["world_size"] == self._world.size:
            self._resumed = state_files.read_pt(choice.path / rank_file(self._world.rank))
            self._unfinished = list(progress.get("unfinished", []))
        info(f"resumes from {choice.name} (epoch {progress['epoch']}, batch {self._batch})")

    def restored(self) -> None:
        """Lightning has loaded its state."""
        if self._resumed is not None and not self._batch:
            self._end_restart()  # between epochs: with max_steps Lightning would go on in the epoch that has ended
        self.call.begin()

    def batches(self, loader: Any) -> Iterator[Any]:
        """Return the batches of a pass over the training data."""
        self._pass = Pass(loader, all_gpus=self._all_gpus)
        if self._resumed is None:
            return self._pass.skip(self._batch) if self._batch and not _keep_position(loader) else self._pass.begin()
        if not self._batch:
            return self._pass.begin_after(self._resumed)
        for part in loader.flattened:
            sampler: Any = getattr(part, "sampler", None)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.trainer.current_epoch)
        return self._pass.resume(self._resumed, 0 if _keep_position(loader) else self._batch)

    def before_epoch(self) -> None:
        """An epoch begins, or an interrupted one continues."""
        if self._resumed is not None and not self._batch:
            lightning_state.restore(self.trainer, self._resumed.get("lightning", {}))
            randomness.restore(self._resumed["now"], all_gpus=self._all_gpus)

    def before_pass(self, data_fetcher: Any) -> None:
        """The first batch of a pass is about to be fetched."""
        if self._resumed is not None and not self._batch and self.trainer.current_epoch > 0:
            iter(data_fetcher)  # Lightning would use the pass that it began before the epoch

    def in_pass(self, data_fetcher: Any) -> None:
        """The pass has begun."""
        resumed, batch, unfinished = self._resumed, self._batch, self._unfinished
        self._resumed, self._batch, self._unfinished = None, 0, []
        if resumed is None or not batch:
            return
        self._end_restart()  # Lightning would skip its work after the next batch: schedulers, a validation
        state = resumed.get("lightning", {})
        lightning_state.restore(self.trainer, state)
        self._continued.enter_context(lightning_state.results_continued(self.trainer, state))
        randomness.restore(resumed["now"], all_gpus=self._all_gpus)
        if UNFINISHED in unfinished:
            info("runs the unfinished validation before training continues")
            self._validation.catch_up(resumed.get("metrics", {}), data_fetcher)

    def _end_restart(self) -> None:
        loop = self.trainer.fit_loop
        loop._restarting = False
        loop.epoch_loop.restarting = False

    @contextlib.contextmanager
    def validation(self) -> Iterator[None]:
        """Surround a validation."""
        if not self.trainer.sanity_checking:
            self._validation.begin(self._position())
        yield
        self._validation.end()  # not after an error: nothing is saved then

    def in_validation(self) -> None:
        """A batch of a validation is done. The trained state has not changed: it is still the point to resume from."""
        if self._validation.can_stop():
            self.call.act_on(self.call.monitor.inside("validate"))

    def interrupt(self) -> Mapping[str, Any]:
        """As ``Driver.interrupt``: an interrupted validation is repeated by the resumed run."""
        if self._validation.before is not None:
            self._validation.take_back()
            self._batch = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
            self._unfinished = [UNFINISHED]
        return {}

    def failed(self, error: BaseException) -> None:
        """The call ends with an error: with a save, where SIGTERM has ended a worker while the next batch was waited for."""
        loop, validation = self.trainer.fit_loop.epoch_loop, self._validation
        progress = loop.batch_progress.current
        is_between = 0 < progress.ready == progress.completed and not loop._should_accumulate()
        was_killed = isinstance(error, RuntimeError) and self.call.was_worker_killed(error)
        if was_killed and is_between and (validation.before is None or validation.can_stop()):
            self._batch = progress.ready
            self.call.stop()
        self.call.failed(error)

    def after_batch(self) -> None:
        """A batch has been used, and a validation run if one was due."""
        loop = self.trainer.fit_loop.epoch_loop
        if not (loop._should_accumulate() or loop._is_training_done):
            self._step_ended(loop.batch_progress.current.ready, epoch_ends=False)

    def after_epoch(self) -> None:
        """An epoch has ended."""
        self._continued.close()
        self._step_ended(0, epoch_ends=True)

    def _step_ended(self, batch: int, *, epoch_ends: bool) -> None:
        self._batch = batch
        self.call.step_ended()
        if epoch_ends and self.call.monitor.schedule.due_at_epoch_end():
            self.call.request("periodic")
        self.call.save_pending()
        self._batch = 0

    def write(self, folder: Path) -> None:
        """As ``StepWriter.write``."""
        folder.mkdir(parents=True, exist_ok=True)
        with _one_file(self.trainer.strategy):
            self.trainer.save_checkpoint(folder / CHECKPOINT, weights_only=False)  # the whole state
        state_files.write_pt(self._validation.before or self._position(), folder / rank_file(self._world.rank))
        if self._world.rank == 0:
            position = {"step": self.trainer.global_step, "epoch": self.trainer.current_epoch, "batch": self._batch}
            unfinished = {"unfinished": self._unfinished} if self._unfinished else {}
            (folder / PROGRESS).write_text(json.dumps(position | unfinished | {"world_size": self._world.size}) + "\n")

    def _position(self) -> dict[str, Any]:
        place = outside_pass(all_gpus=self._all_gpus) if self._pass is None else self._pass.state()
        return place | {"lightning": lightning_state.read(self.trainer)}

    def unreadable(self) -> list[str]:
        """As ``StepWriter.unreadable``. Of Lightning's own file classes of any kind are read."""
        return unreadable([(Path(rank_file(self._world.rank)).stem, self._position, state_files.load_pt)])

    def write_final(self, folder: Path) -> None:
        """As ``StepWriter.write_final``: the model's weights."""
        folder.mkdir(exist_ok=True)
        weights = self.trainer.strategy.lightning_module_state_dict()
        sharded = any(type(value) is not torch.Tensor for value in weights.values())
        state = ({}, {"model": weights}) if sharded else ({"model": weights}, {})
        state_files.write(state, folder, rank=self._world.rank, group=self.call.consensus.group)


class _PlainFile:
    """A CheckpointIO that streams the file to disk, where Lightning's own holds it in memory; its write can be deferred."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        torch.save(checkpoint, path)


def _obstacle(strategy: Any) -> str | None:
    """Return the name of a strategy that writes sharded state by all ranks together; ``None``: rank 0 writes one file."""
    writes = next(kind for kind in type(strategy).__mro__ if "save_checkpoint" in vars(kind))
    return None if writes.__name__ == "Strategy" else type(strategy).__name__


@contextlib.contextmanager
def _one_file(strategy: Any) -> Iterator[None]:
    """Have rank 0 write the file of a strategy whose state it holds, while no rank waits for another.

    Lightning ends a save with a barrier, which rank 0 does not reach after an error: the others would wait for it there.
    """
    if _obstacle(strategy):
        with replaced(strategy, "_checkpoint_io", None):
            yield
        return
    barrier = strategy.barrier

    def pass_by(name: Any = None, *args: Any, **kwargs: Any) -> Any:
        return None if name == _SAVE_BARRIER else barrier(name, *args, **kwargs)

    # The script's CheckpointIO may return before it has written, or write elsewhere.
    with replaced(strategy, "_checkpoint_io", _PlainFile()), replaced(strategy, "barrier", pass_by):
        yield


def _keep_position(loader: Any) -> bool:
    """Whether Lightning itself restores the position in the data."""
    return all(is_stateful(part) for part in loader.flattened)


def _step_of_file(path: Any) -> int:
    try:
        return int(torch.load(path, map_location="cpu", mmap=True, weights_only=True)["global_step"])
    except Exception:  # unreadable: the other checkpoint is complete at least
        return -1
