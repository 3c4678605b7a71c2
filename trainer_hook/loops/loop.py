"""A training loop that a later process continues at the same batch. Each library's module says how its objects are saved."""

from __future__ import annotations

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
from trainer_hook.loops.loading import Pass, outside_pass
from trainer_hook.loops.state_files import read_pt, write_pt
from trainer_hook.process.log import info
from trainer_hook.process.session import session_from_environment
from trainer_hook.train_call.driver import Driver
from trainer_hook.train_call.train_call import TrainCall

Batch = TypeVar("Batch")

PROGRESS = "progress.json"


def rank_file(rank: int) -> str:
    """Return the name of the file with a rank's random state and position in the data."""
    return f"rank_{rank}.pt"


def missing_from(files: Mapping[str, int], *, rank: int, world_size: int, saved_world_size: int | None) -> list[str]:
    """Return what a checkpoint of a loop lacks for one rank. Arguments as in ``trainer_hook.resuming.resumer.missing_from``."""
    own = [rank_file(rank)] if saved_world_size in (None, world_size) else []
    return [name for name in (PROGRESS, *own) if name not in files]


class Loop:
    """Counts steps, epochs and batches, saves when that is due, and continues where an earlier process stopped.

    A subclass writes and loads its objects (``_write``, ``_load``) and may decide when a step has ended (``_stepped``).
    Every rank must call the same methods in the same order.
    """

    global_step: int = 0
    """Finished steps of this loop, those of earlier processes included."""
    epoch: int = 0
    batch: int = 0
    """Used batches of the current epoch."""

    def __init__(self, sampler: Any = None) -> None:
        self._sampler = sampler
        self._session = session_from_environment()
        self._pass: Pass | None = None
        self._resumed: dict[str, Any] | None = None
        """The ``Pass.state`` of the checkpoint, until the loop has continued there."""
        self._finished = False
        self._in_epochs = self._passed = False
        self._call: TrainCall | None = None

    def _write(self, folder: Path) -> None:
        """Write the state of the objects. Collective."""
        raise NotImplementedError

    def _load(self, folder: Path, progress: Mapping[str, Any]) -> None:
        """Load the state of the objects. Collective."""
        raise NotImplementedError

    def _write_final(self, folder: Path) -> None:
        """Write the trained model. Collective. By default there is none."""

    def _meta(self) -> dict[str, Any]:
        """Return additions to the marker's ``meta``."""
        return {}

    def _reads_all(self) -> bool:
        """As ``Driver.reads_all``."""
        return False

    def _about(self) -> dict[str, Any]:
        """Return additions to ``progress.json``, for ``_load``."""
        return {}

    def _background(self) -> Background | None:
        """As ``Driver.background``."""
        return None

    def _large_objects(self) -> Sequence[Any]:
        """As ``Driver.large_objects``."""
        return ()

    def _stepped(self, accumulate: int) -> bool:
        """Whether the optimizer has just made a step: saves are possible only then."""
        return self.batch % accumulate == 0

    def __enter__(self) -> Any:
        if self._session is None:
            return self
        _expect_process_group()
        self._call = call = TrainCall(self._session, _LoopDriver(self))
        self._world = call.consensus.world
        self._resume(call)
        call.hold_signals()
        call.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        call = self._call
        if call is None:
            return
        try:
            if error is None:
                had_finished, self._finished = self._finished, True
                if not had_finished:
                    call.finish()
                call.end()
        finally:
            call.close()

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs of ``total``. An interrupted one is yielded again."""
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
        """Yield the remaining batches, and save after a step when that is due.

        Inside ``epochs()`` it is one pass over ``loader``. Outside it is ``epochs`` passes (default: one, or as many as
        ``max_steps`` takes).

        Args:
            loader: Batches; it is iterated anew in each epoch.
            epochs: Passes over it.
            max_steps: The loop ends at this step, those of earlier processes included.
            accumulate: Batches per optimizer step; saves come only after a whole one.

        Raises:
            RuntimeError: Called a second time outside ``epochs()``: the position of a resumed run would be ambiguous.
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
        if self._call is None:
            return iter(loader)
        saved, self._resumed = self._resumed, None
        self._pass = Pass(loader, all_gpus=self._all_gpus)
        if saved is None:
            return self._pass.skip(self.batch)
        return self._pass.resume(saved, self.batch) if self.batch else self._pass.begin_after(saved)

    def _next(self, batches: Iterator[Any]) -> Any:
        try:
            return next(batches, self)
        except RuntimeError as error:
            if self._call is None or not self._call.was_worker_killed(error):
                raise
            self._call.stop()

    @property
    def _all_gpus(self) -> bool:
        return self._call is None or self._world.local_size == 1

    def step(self) -> None:
        """Count a step, and save or stop if that is due. ``steps()`` calls it; without ``steps()`` the script does."""
        self.global_step += 1
        if (call := self._entered()) is not None:
            call.step_ended()
            call.save_pending()

    def _between_epochs(self) -> None:
        if (call := self._entered()) is not None:
            call.follow(call.monitor.at_epoch_end())
            call.save_pending()

    def _entered(self) -> TrainCall | None:
        if self._session is not None and self._call is None:
            raise RuntimeError("a Checkpointer saves inside its with statement: write 'with Checkpointer(…) as ckpt: …'")
        return self._call

    def save(self) -> bool:
        """Save now. Only where a step has ended: after ``step()``, or between two epochs. Returns whether it is saved."""
        return (call := self._entered()) is not None and call.save("manual")

    def _write_all(self, folder: Path) -> None:
        """Write everything that a resume needs. Collective."""
        folder.mkdir(parents=True, exist_ok=True)
        self._write(folder)
        position = outside_pass(all_gpus=self._all_gpus) if self._pass is None else self._pass.state()
        if _has_state(self._sampler):
            position["sampler"] = self._sampler.state_dict()
        write_pt(position, folder / rank_file(self._world.rank))
        if self._world.rank == 0:
            progress = {"step": self.global_step, "epoch": self.epoch, "batch": self.batch, "finished": self._finished}
            progress["world_size"] = self._world.size
            (folder / PROGRESS).write_text(json.dumps(progress | self._about()) + "\n")

    def _resume(self, call: TrainCall) -> None:
        choice = call.resume()
        if choice is None:
            return
        progress = json.loads((choice.path / PROGRESS).read_text())
        self._load(choice.path, progress)
        self.global_step, self.epoch, self.batch = (int(progress[key]) for key in ("step", "epoch", "batch"))
        self._finished = bool(progress["finished"])
        if progress["world_size"] == self._world.size:
            self._resumed = read_pt(choice.path / rank_file(self._world.rank))
            if "sampler" in self._resumed and _has_state(self._sampler):
                self._sampler.load_state_dict(self._resumed["sampler"])
        else:  # each rank has another part of the data: skip the same share of the epoch
            self.batch = self.batch * int(progress["world_size"]) // self._world.size
        self._restore_random()
        info(f"resumes from {choice.name} (epoch {self.epoch}, batch {self.batch})")

    def _restore_random(self) -> None:
        if self._resumed is not None:
            randomness.restore(self._resumed["now"], all_gpus=self._all_gpus)


def _has_state(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def _expect_process_group() -> None:
    if int(os.environ.get("WORLD_SIZE") or 1) > 1 and not torch.distributed.is_initialized():
        raise RuntimeError("WORLD_SIZE is greater than 1, but there is no process group: call init_process_group() before")


class _LoopDriver(Driver):
    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    @property
    def global_step(self) -> int:
        return self._loop.global_step

    missing_files = staticmethod(missing_from)

    def reads_all(self) -> bool:
        return self._loop._reads_all()

    def background(self) -> Background | None:
        return self._loop._background()

    def large_objects(self) -> Sequence[Any]:
        return self._loop._large_objects()

    def meta(self) -> Mapping[str, Any]:
        return self._loop._meta()

    def write(self, folder: Path) -> None:
        self._loop._write_all(folder)

    def write_final(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._loop._write_final(folder)
