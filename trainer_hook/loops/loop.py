"""A training loop that a later process continues at the same batch. How objects are saved is left to each library's file."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from trainer_hook.asynchronous.background import Background
from trainer_hook.loops import randomness
from trainer_hook.loops.loading import Pass, nowhere
from trainer_hook.loops.state_files import read_pt, write_pt
from trainer_hook.process.log import say
from trainer_hook.process.session import Session, session_from_environment
from trainer_hook.resuming.resumer import Resumer
from trainer_hook.saving.async_save import prepare
from trainer_hook.saving.step_monitor import StepMonitor, leave
from trainer_hook.saving.step_saver import StepSaver

Batch = TypeVar("Batch")

PROGRESS = "progress.json"


def rank_file(rank: int) -> str:
    """Return the name of what is a rank's own: its random state and its place in the data."""
    return f"rank_{rank}.pt"


def missing_from(files: Mapping[str, int], *, rank: int, world_size: int, saved_world_size: int | None) -> list[str]:
    """Return what a checkpoint of a loop lacks for one rank. Arguments as in ``trainer_hook.resuming.resumer.missing_from``."""
    own = [rank_file(rank)] if saved_world_size in (None, world_size) else []
    return [name for name in (PROGRESS, *own) if name not in files]


class Loop:
    """Counts steps, epochs and batches, saves when that is due, and continues where an earlier process stood.

    A subclass writes and loads its objects (``_write``, ``_load``) and may know better when a step has ended (``_stepped``).
    On each rank the same methods must be called in the same order.
    """

    global_step: int = 0
    """Finished steps of this loop, also those of earlier processes."""
    epoch: int = 0
    batch: int = 0
    """Batches of the current epoch that were used."""

    def __init__(self, sampler: Any = None) -> None:
        self._sampler = sampler
        self._session = session_from_environment()
        self._pass: Pass | None = None
        self._resumed: dict[str, Any] | None = None
        """This rank's place in the data, until the loop has come there."""
        self._finished = False
        self._in_epochs = self._passed = False
        self._open = contextlib.ExitStack()

    def _write(self, folder: Path) -> None:
        """Write the state of the objects. Collective."""
        raise NotImplementedError

    def _load(self, folder: Path, progress: Mapping[str, Any]) -> None:
        """Load the state of the objects. Collective."""
        raise NotImplementedError

    def _write_final(self, folder: Path) -> None:
        """Write the trained model. Collective. Nothing by default."""

    def _meta(self) -> dict[str, Any]:
        """Return what the marker says of a checkpoint, besides what all of them say."""
        return {}

    def _reads_all(self) -> bool:
        """Whether loading may read files that only ranks of other nodes wrote for themselves."""
        return False

    def _about(self) -> dict[str, Any]:
        """Return what ``_load`` will want to know, for ``progress.json``."""
        return {}

    def _background(self, session: Session) -> Background | None:
        """Return what writes saves beside training, if anything does. Collective."""
        return None

    def _large(self) -> Sequence[Any]:
        """Return the modules and optimizers that this rank saves."""
        return ()

    def _stepped(self, accumulate: int) -> bool:
        """Whether the optimizer has just made a step: what is between two of them cannot be saved."""
        return self.batch % accumulate == 0

    def __enter__(self) -> Any:
        session = self._session
        if session is None:
            return self
        session.outcome = None
        _expect_process_group()
        agreement = session.join()
        self._world = agreement.world
        if not agreement.all_agree(session.stop.told_at_s is None):
            leave(session, 0)
        self._resume(session)
        self._saver = _LoopSaver(session, self)
        self._pace = StepMonitor(session)
        self._open.enter_context(session.stop.training())
        self._open.callback(self._saver.end)
        self._pace.begin(self.global_step)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        session = self._session
        with self._open:
            if session is None or error is not None:
                return
            nothing_new = self._finished
            self._finished = True
            if not nothing_new:
                self._save("periodic")
                self._saver.settle()
                self._saver.save_final(self.global_step)
            if not session.join().all_agree(session.stop.told_at_s is None or not session.settings.jit):
                leave(session, self.global_step)
        session.tell_state("running", session.base_step + self.global_step)
        session.base_step += self.global_step
        session.train_calls += 1
        session.outcome = "succeeded"

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left, from ``total``; a resumed one comes again, for its other batches."""
        yield from self._epochs(range(total))

    def _epochs(self, numbers: Iterable[int]) -> Iterator[int]:
        for number in numbers:
            if self._finished:
                return
            if number < self.epoch:
                continue
            if self._resumed is not None and self.batch == 0:
                self._restore_random()
            self._in_epochs = True
            try:
                yield number
            finally:
                self._in_epochs = False
            self.epoch, self.batch = number + 1, 0
            self._between_epochs()

    def steps(
        self, loader: Iterable[Batch], *, epochs: int | None = None, max_steps: int | None = None, accumulate: int = 1
    ) -> Iterator[Batch]:
        """Yield the batches that are left, and save after a step when that is due.

        Inside ``epochs()`` it is one pass over ``loader``, the same in each epoch. Outside it is ``epochs`` of them (default:
        one, or as many as ``max_steps`` takes).

        Args:
            loader: Batches; it is iterated anew in each epoch.
            epochs: Passes over it.
            max_steps: Ends the loop after this many steps, those of earlier processes included.
            accumulate: Batches per optimizer step; saves come only after a whole one.

        Raises:
            RuntimeError: Called a second time outside ``epochs()``: nobody could say where a resumed run stands.
        """
        if self._in_epochs:
            if epochs is not None:
                raise ValueError("steps(epochs=…) inside epochs(): give the number to epochs() alone")
            yield from self._one_pass(loader, max_steps, accumulate)
            return
        if self._passed:
            raise RuntimeError("steps() a second time: write 'for epoch in ckpt.epochs(n): for batch in ckpt.steps(loader): …'")
        self._passed = True
        passes = itertools.count() if epochs is None and max_steps is not None else range(epochs or 1)
        for _ in self._epochs(passes):
            yield from self._one_pass(loader, max_steps, accumulate)
            if max_steps is not None and self.global_step >= max_steps:
                return

    def _one_pass(self, loader: Iterable[Batch], max_steps: int | None, accumulate: int) -> Iterator[Batch]:
        if self._finished or (max_steps is not None and self.global_step >= max_steps):
            return
        batches = self._begin_pass(loader)
        while (batch := self._next(batches)) is not self:
            yield batch
            self.batch += 1
            if self._stepped(accumulate):
                self.step()
                if max_steps is not None and self.global_step >= max_steps:
                    return

    def _begin_pass(self, loader: Any) -> Iterator[Any]:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(self.epoch)
        if self._session is None:
            return iter(loader)
        saved, self._resumed = self._resumed, None
        self._pass = Pass(loader, alone=self._alone)
        if saved is None:
            return self._pass.skip(self.batch)
        return self._pass.resume(saved, self.batch) if self.batch else self._pass.begin_after(saved)

    def _next(self, batches: Iterator[Any]) -> Any:
        try:
            return next(batches, self)
        except RuntimeError as error:
            # The group's SIGTERM ends DataLoader workers, too: the last step stands.
            if self._session is None or self._session.stop.told_at_s is None or "DataLoader worker" not in str(error):
                raise
            self._stop()

    @property
    def _alone(self) -> bool:
        return self._session is None or self._session.join().world.local_size == 1

    def step(self) -> None:
        """A step has ended: count it, and save or stop if that is due. ``steps()`` calls it; without that the script does."""
        self.global_step += 1
        if self._session is None:
            return
        self._saver.step_ended()
        due = self._pace.at_step(self.global_step)
        if due.stop:
            self._stop()
        if due.reason is not None:
            self._save(due.reason)

    def _between_epochs(self) -> None:
        if self._session is None:
            return
        due = self._pace.at_epoch_end()
        if due.stop:
            self._stop()
        if due.reason is not None:
            self._save(due.reason)

    def save(self) -> bool:
        """Save now. Only where a step has ended: after ``step()``, or between two epochs. Returns whether it is saved."""
        return self._session is not None and self._save("manual")

    def _save(self, reason: str) -> bool:
        if not self.global_step:
            return False
        self._saver.step_seconds = self._pace.step_seconds
        saved = self._saver.save(None, self.global_step, reason)
        self._pace.saved(self.global_step, ok=saved)
        return saved

    def _stop(self) -> Any:
        self._pace.stop(self.global_step, self._save_just_in_time)

    def _save_just_in_time(self) -> bool:
        self._saver.make_room()
        return self._saver.save(None, self.global_step, "jit")

    def _write_all(self, folder: Path) -> None:
        """Write everything that a resume needs. Collective."""
        folder.mkdir(parents=True, exist_ok=True)
        self._write(folder)
        place = nowhere(alone=self._alone) if self._pass is None else self._pass.state()
        if _has_state(self._sampler):
            place["sampler"] = self._sampler.state_dict()
        write_pt(place, folder / rank_file(self._world.rank))
        if self._world.rank == 0:
            progress = {"step": self.global_step, "epoch": self.epoch, "batch": self.batch, "finished": self._finished}
            progress["world_size"] = self._world.size
            (folder / PROGRESS).write_text(json.dumps(progress | self._about()) + "\n")

    def _resume(self, session: Session) -> None:
        agreement = session.join()
        resumer = Resumer(session.settings, session.client, agreement, missing=missing_from, reads_all=self._reads_all())
        choice = resumer.choose(session.train_calls)
        if choice is None:
            say("no checkpoint to resume from")
            return
        if session.train_calls == 0:
            session.base_step = choice.base_step
        session.continues_from(choice.name, attempt=choice.attempt)
        progress = json.loads((choice.path / PROGRESS).read_text())
        self._load(choice.path, progress)
        self.global_step, self.epoch, self.batch = (int(progress[key]) for key in ("step", "epoch", "batch"))
        self._finished = bool(progress["finished"])
        if progress["world_size"] == self._world.size:
            self._resumed = read_pt(choice.path / rank_file(self._world.rank))
            if "sampler" in self._resumed and _has_state(self._sampler):
                self._sampler.load_state_dict(self._resumed["sampler"])
        else:  # each rank has another part of the data now: the same share of the epoch is skipped
            self.batch = self.batch * int(progress["world_size"]) // self._world.size
        self._restore_random()
        say(f"resumes from {choice.name} (epoch {self.epoch}, batch {self.batch})")

    def _restore_random(self) -> None:
        if self._resumed is not None:
            randomness.restore(self._resumed["now"], alone=self._alone)


def _has_state(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def _expect_process_group() -> None:
    if int(os.environ.get("WORLD_SIZE") or 1) > 1 and not torch.distributed.is_initialized():
        raise RuntimeError("WORLD_SIZE is greater than 1, but there is no process group: call init_process_group() before")


class _LoopSaver(StepSaver):
    def __init__(self, session: Session, loop: Loop) -> None:
        super().__init__(session, loop._background(session))
        self._loop = loop
        self._is_ready = self._background is None

    def step_ended(self) -> None:
        """From the first step on the optimizer has its state: what saves beside training need is taken now."""
        if not self._is_ready and self._background is not None:
            self._is_ready = True
            prepare(self._background, self._loop._large())

    def _write(self, model: Any, global_step: int) -> None:
        self._loop._write_all(self._volume / self.name(global_step))

    def _about(self) -> dict[str, Any]:
        return self._loop._meta()

    def _write_final(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._loop._write_final(folder)
