"""A training loop that saves named objects and that a later process continues at the same batch."""

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
from trainer_hook.contract import META_OWN_SHARDS
from trainer_hook.loops import randomness, state_files
from trainer_hook.loops.loading import EPOCH_OF_WORKERS, Pass, has_own_epoch, outside_pass
from trainer_hook.loops.position import PROGRESS, read_position
from trainer_hook.process.log import info
from trainer_hook.process.session import session_from_environment
from trainer_hook.process.training_progress import TrainingProgress
from trainer_hook.saving.async_save import background_for
from trainer_hook.saving.readable import unreadable
from trainer_hook.train_call.driver import Driver
from trainer_hook.train_call.train_call import TrainCall

Batch = TypeVar("Batch")


def rank_file(rank: int) -> str:
    """Return the name of the file with a rank's random state and position in the data."""
    return f"rank_{rank}.pt"


def missing_from(files: Mapping[str, int], *, rank: int, world_size: int, saved_world_size: int | None) -> list[str]:
    """Return what a checkpoint of a loop lacks for one rank. Arguments as of ``Driver.missing_files``."""
    own = [rank_file(rank)] if saved_world_size in (None, world_size) else []
    return [name for name in (PROGRESS, *own) if name not in files]


class Loop:
    """Counts steps, epochs and batches, saves when that is due, and continues where an earlier process stopped.

    A subclass may save and load more than the named objects, and may decide when a step has ended. Every rank must call the
    same methods in the same order.
    """

    global_step: int = 0
    """Finished steps of this loop, those of earlier processes included."""
    epoch: int = 0
    batch: int = 0
    """Used batches of the current epoch."""

    def __init__(self, objects: Mapping[str, Any], sampler: Any = None) -> None:
        """``None`` among the objects stands for one that is not used. Raises ``TypeError``: an object has no state."""
        self._sampler = sampler
        self._session = session_from_environment()
        self._call: TrainCall | None = None
        self._pass: Pass | None = None
        self._resumed: dict[str, Any] | None = None
        """The ``Pass.state`` of the checkpoint, until the loop has continued there."""
        self._finished = False
        self._in_epochs = self._passed = False
        self._epochs_planned: int | None = None
        self._steps_planned: int | None = None
        self._objects = {name: thing for name, thing in objects.items() if thing is not None}
        for name, thing in self._objects.items():
            if not _has_state(thing):
                raise TypeError(f"{name}: {type(thing).__name__} has no state_dict() and load_state_dict()")
        self._save_group: Any = None

    def _write(self, folder: Path) -> None:
        """Write the state of the objects. Collective."""
        self._write_objects(self._objects, folder)

    def _write_objects(self, objects: Mapping[str, Any], folder: Path) -> None:
        state_files.write(state_files.collect(objects), folder, rank=self._world.rank, group=self._save_group or self._group)

    def _load(self, folder: Path, progress: Mapping[str, Any]) -> None:
        """Load the state of the objects. Collective. ``progress``: content of ``progress.json``."""
        saved = progress.get("objects", [])
        if lacking := sorted(set(self._objects) - set(saved)):
            raise state_files.StateMismatch(
                f"{folder.name} holds {', '.join(saved)}, but not {', '.join(lacking)}: "
                "resume with the objects that were saved, or begin anew under another CKPT_STORE prefix"
            )
        if unused := sorted(set(saved) - set(self._objects)):
            info(f"{folder.name}: {', '.join(unused)} is in the checkpoint, but this run has no such object")
        state_files.load(self._objects, folder, group=self._group)

    def _write_final(self, folder: Path) -> None:
        """Write the trained model. Collective."""
        raise NotImplementedError

    def _obstacle(self) -> str | None:
        """Return the name of a library or strategy that rules out asynchronous saves; ``None``: they are possible."""
        return None

    def _background(self) -> Background | None:
        assert self._session is not None
        consensus, sharded = self._session.join(), state_files.is_sharded(self._objects)
        ranks = consensus.world.local_size if sharded else 1
        background = background_for(self._session.settings, self._obstacle(), ranks=ranks)
        if background is not None and sharded:
            self._save_group = consensus.new_group()  # a thread ends the save on it, while this thread uses the other group
        return background

    def _large_objects(self) -> Sequence[Any]:
        saves = self._world.rank == 0 or state_files.is_sharded(self._objects)
        return list(self._objects.values()) if saves else []

    def _reads_all(self) -> bool:
        size = 1 if self._session is None else self._session.join().world.size
        return not state_files.reads_own_shards(self._objects, size)

    def _stepped(self, accumulate: int) -> bool:
        """Whether the optimizer has just made a step: saves are possible only then."""
        return self.batch % accumulate == 0

    @property
    def _group(self) -> Any:
        return None if self._session is None else self._session.join().group

    @property
    def _all_gpus(self) -> bool:
        return self._call is None or self._world.local_size == 1

    def __enter__(self) -> Any:
        if self._session is None:
            return self
        if self._session.is_inner_call():
            self._session = None
            return self
        if int(os.environ.get("WORLD_SIZE") or 1) > 1 and not torch.distributed.is_initialized():
            raise RuntimeError("WORLD_SIZE is greater than 1, but there is no process group: call init_process_group() before")
        self._call = call = TrainCall(self._session, _LoopDriver(self))
        self._world = call.consensus.world
        with call.loading():
            self._resume(call)
        call.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        call = self._call
        if call is None:
            return
        try:
            if error is None:
                self._finished = True
                call.finish()  # also of a run that had finished: its process may have ended before it wrote the final model
                call.end()
        finally:
            if error is None:
                call.close()
            else:
                call.failed(error)

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs of ``total``. An interrupted one is yielded again."""
        yield from self._epochs(range(total))

    def _epochs(self, numbers: Iterable[int]) -> Iterator[int]:
        self._epochs_planned = len(numbers) if isinstance(numbers, range) else None
        for number in numbers:
            if self._finished:
                return
            if number < self.epoch:
                continue
            if self.batch == 0:
                self._restore_random()
            self._in_epochs = True
            try:
                yield number
            finally:
                self._in_epochs = False
            self.epoch, self.batch = number + 1, 0
            if (call := self._entered()) is not None:
                call.act_on(call.monitor.at_epoch_end())
                call.save_pending()

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

        Raises ``RuntimeError``: called a second time outside ``epochs()``: the position of a resumed run would be ambiguous.
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
        self._steps_planned = max_steps or self._steps_of(loader, accumulate)
        if type(self)._stepped is Loop._stepped:  # another number of ranks may resume between two steps: no gradients are saved
            self.batch -= self.batch % accumulate
        batches = self._begin_pass(loader)
        while (batch := self._next(batches)) is not self:
            yield batch
            self.batch += 1
            if self._stepped(accumulate):
                self.step()
                if max_steps is not None and self.global_step >= max_steps:
                    return

    def _steps_of(self, loader: Any, accumulate: int) -> int | None:
        """Return the steps of all epochs; ``None``: unknown."""
        if type(self)._stepped is not Loop._stepped:  # the library decides which batches end a step
            return None
        # Not of a DataLoader itself: it would warn about the length of an IterableDataset.
        sized: Any = loader if isinstance(loader, Sequence) else getattr(loader, "batch_sampler", None)
        with contextlib.suppress(Exception):
            return None if self._epochs_planned is None else self._epochs_planned * (len(sized) // accumulate)
        return None

    def _begin_pass(self, loader: Any) -> Iterator[Any]:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(self.epoch)
        if self._entered() is None:
            return iter(loader)
        saved, self._resumed = self._resumed, None
        self._pass = Pass(loader, all_gpus=self._all_gpus)
        if saved is None:
            return self._pass.skip(self.batch)
        if self.epoch and getattr(loader, "persistent_workers", False) and has_own_epoch(getattr(loader, "dataset", None)):
            info(f"this resume is not bit-identical: {EPOCH_OF_WORKERS}")
        return self._pass.resume(saved, self.batch) if self.batch else self._pass.begin_after(saved)

    def _next(self, batches: Iterator[Any]) -> Any:
        try:
            return next(batches, self)
        except RuntimeError as error:
            if self._call is None or not self._call.was_worker_killed(error):
                raise
            self._call.stop()

    def step(self) -> None:
        """Count a step, and save or stop if that is due. ``steps()`` calls it; without ``steps()`` the script does."""
        self.global_step += 1
        if (call := self._entered()) is not None:
            call.step_ended()
            call.save_pending()

    def save(self) -> bool:
        """Save now. Only where a step has ended: after ``step()``, or between two epochs. Returns whether it is saved."""
        return (call := self._entered()) is not None and call.save("manual")

    def _entered(self) -> TrainCall | None:
        """Return the call; ``None``: there is no volume, and nothing is saved."""
        if self._session is not None and self._call is None:
            raise RuntimeError("a Checkpointer saves inside its with statement: write 'with Checkpointer(…) as ckpt: …'")
        return self._call

    def _write_all(self, folder: Path) -> None:
        """Write everything that a resume needs. Collective."""
        folder.mkdir(parents=True, exist_ok=True)
        self._write(folder)
        state_files.write_pt(self._place(), folder / rank_file(self._world.rank))
        if self._world.rank == 0:
            position = {"step": self.global_step, "epoch": self.epoch, "batch": self.batch, "finished": self._finished}
            progress = {**position, "world_size": self._world.size, "objects": sorted(self._objects)}
            (folder / PROGRESS).write_text(json.dumps(progress) + "\n")

    def _place(self) -> dict[str, Any]:
        """Return this rank's position in the data, and its random state."""
        place = outside_pass(all_gpus=self._all_gpus) if self._pass is None else self._pass.state()
        return place | {"sampler": self._sampler.state_dict()} if _has_state(self._sampler) else place

    def _unreadable(self) -> list[str]:
        """As ``StepWriter.unreadable``."""
        rank = self._world.rank
        return unreadable(
            [
                *(state_files.replicated(self._objects) if rank == 0 else ()),
                (Path(rank_file(rank)).stem, self._place, state_files.load_pt),
            ]
        )

    def _resume(self, call: TrainCall) -> None:
        choice = call.resume()
        if choice is None:
            return
        progress = read_position(choice.path)
        self._load(choice.path, progress)
        self.global_step, self.epoch, self.batch = (progress[key] for key in ("step", "epoch", "batch"))
        self._finished = bool(progress.get("finished"))
        if progress["world_size"] == self._world.size:
            self._resumed = state_files.read_pt(choice.path / rank_file(self._world.rank))
            if "sampler" in self._resumed and _has_state(self._sampler):
                self._sampler.load_state_dict(self._resumed["sampler"])
        else:  # each rank has another part of the data: skip the same share of the epoch
            self.batch = self.batch * progress["world_size"] // self._world.size
        self._restore_random()
        info(f"resumes from {choice.name} (epoch {self.epoch}, batch {self.batch})")
        if self._world.size > 2 and any(map(rebuilds_buckets, self._objects.values())):  # a sum of two has one order
            info("this resume is not bit-identical: DistributedDataParallel sums its first gradients in another order")

    def _restore_random(self) -> None:
        if self._resumed is not None:
            randomness.restore(self._resumed["now"], all_gpus=self._all_gpus)


def rebuilds_buckets(thing: Any) -> bool:
    """Whether an object is a model that arranges its gradients anew after the first step of each process."""
    ddp = torch.nn.parallel.DistributedDataParallel
    return isinstance(thing, ddp) and (thing.static_graph or not thing.find_unused_parameters)


def _has_state(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


class _LoopDriver(Driver):
    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    missing_files = staticmethod(missing_from)

    def check(self, folder: Path) -> None:
        read_position(folder)

    @property
    def global_step(self) -> int:
        return self._loop.global_step

    def progress(self) -> TrainingProgress:
        return TrainingProgress(self._loop._steps_planned)

    def reads_all(self) -> bool:
        return self._loop._reads_all()

    def background(self) -> Background | None:
        return self._loop._background()

    def large_objects(self) -> Sequence[Any]:
        return self._loop._large_objects()

    def meta(self) -> Mapping[str, Any]:
        objects = self._loop._objects
        alike = state_files.is_sharded(objects) and state_files.reads_own_shards(objects, self._loop._world.size)
        return {META_OWN_SHARDS: True} if alike else {}

    def write(self, folder: Path) -> None:
        self._loop._write_all(folder)

    def unreadable(self) -> list[str]:
        return self._loop._unreadable()

    def write_final(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._loop._write_final(folder)
