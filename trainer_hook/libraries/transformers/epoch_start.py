"""The random state at the start of an epoch, from which samplers shuffle that draw from the global generators or their own.

Trainer's own sampler has a seed and no state. ``group_by_length`` and a loader of the script (``get_train_dataloader``) draw
when a pass over the data begins; Trainer restores the random state only after it has skipped the used batches of the epoch,
which were then those of another order.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer_hook.libraries.transformers import random_state
from trainer_hook.libraries.transformers.step_tail import has_epoch_ended
from trainer_hook.process.patching import replaced
from trainer_hook.resuming.resumer import Choice


class EpochStart:
    """Saved beside each checkpoint on the volume by every rank, and restored by a run that resumes."""

    def __init__(self, trainer: Any, volume: Path) -> None:
        """``volume``: saves elsewhere, of the script itself, get no further file."""
        self._trainer = trainer
        self._volume = volume
        self._loader: Any = None
        self._start: dict[str, Any] = {}
        self._resumes_from: Path | None = None
        self._is_resumed = self._is_between = False
        self._unrestored: Path | None = None
        """Checkpoint whose random state Trainer restores before the first step."""
        self._is_told_to_stop = False
        self._undo = contextlib.ExitStack()

    def training_begins(self, choice: Choice | None) -> None:
        """``choice``: the checkpoint from which this run resumes."""
        self._start, self._resumes_from = {}, None if choice is None else choice.path
        self._is_resumed = choice is not None
        self._is_between = choice is not None and has_epoch_ended(choice.meta)
        self._unrestored = self._resumes_from

    def restore_between_epochs(self) -> None:
        """Nothing of the step before is left to do: the script's callbacks may draw random numbers when the epoch begins."""
        if self._resumes_from is not None and self._is_at_epoch_start:
            trainer = self._trainer
            trainer._load_rng_state(str(self._resumes_from))
            random_state.restore_at_next_load(trainer, random_state.read(trainer))

    @property
    def _is_at_epoch_start(self) -> bool:
        return self._is_between or float(self._trainer.state.epoch or 0).is_integer()

    def epoch_begins(self, loader: Any, control: Any) -> None:
        """The pass over the data is about to begin, after every callback of the script."""
        self._is_told_to_stop = control.should_training_stop
        folder, self._resumes_from, self._loader = self._resumes_from, None, loader
        is_first_pass = folder is not None and not self._is_between and float(self._trainer.state.epoch or 0) < 1
        if folder is not None:
            self._restore(folder)
        self._start = {"epoch_start": random_state.read(self._trainer), "generators": self._generators()}
        self._undo.close()
        if self._is_resumed and not is_first_pass and getattr(loader, "persistent_workers", False):
            from trainer_hook.loops.loading import unseeded

            self._undo.enter_context(unseeded(loader))

    def step_begins(self) -> None:
        """The first batch of the pass has been fetched."""
        self._unrestored = None
        self._undo.close()

    def epoch_ends(self, control: Any) -> None:
        """The pass has ended, for a run that resumes at its end without a step, which Trainer before 5 does not expect.

        It restores no random state then, and its oldest versions end training for want of data.
        """
        has_begun = self._resumes_from is None  # else it is the end of the epoch before, caught up with
        if has_begun and self._unrestored is not None and not hasattr(self._trainer, "_run_epoch"):
            self._trainer._load_rng_state(str(self._unrestored))
            self._unrestored = None
            control.should_training_stop = self._is_told_to_stop

    def training_ends(self) -> None:
        """Training has ended. Without a step the random state has not been restored, for what the script does next."""
        if self._unrestored is not None:
            self._trainer._load_rng_state(str(self._unrestored))

    def _restore(self, folder: Path) -> None:
        saved = self._saved(folder)
        if self._is_at_epoch_start:
            # Trainer restores the random state after this event and before the pass: to that of now.
            random_state.restore_at_next_load(self._trainer, random_state.read(self._trainer))
            states = saved.get("generators_now")
        else:
            states = saved.get("generators")
            if "epoch_start" in saved:
                random_state.restore(self._trainer, saved["epoch_start"])
        for generator, state in zip(_generators_of(self._loader), states or (), strict=False):
            generator.set_state(state)

    def _saved(self, folder: Path) -> dict[str, Any]:
        """Return what this rank saved; nothing if another number of ranks did."""
        from trainer_hook.loops import state_files

        args, path = self._trainer.args, self._file(folder)
        if args.ignore_data_skip or not path.is_file():
            return {}
        saved: dict[str, Any] = state_files.read_pt(path)
        return saved if saved.get("world_size") == args.world_size else {}

    @contextlib.contextmanager
    def saved(self) -> Iterator[None]:
        """Surround training: wherever Trainer saves the random state on the volume, that of the epoch's start is added."""
        original = self._trainer._save_rng_state

        def save_rng_state(output_dir: Any) -> None:
            original(output_dir)
            if self._start and Path(output_dir).resolve().is_relative_to(self._volume.resolve()):
                self._write(Path(output_dir))

        with replaced(self._trainer, "_save_rng_state", save_rng_state), self._undo:
            yield

    def _write(self, folder: Path) -> None:
        from trainer_hook.loops import randomness, state_files

        start = randomness.portable(self._start["epoch_start"])
        now = {"generators_now": self._generators(), "world_size": self._trainer.args.world_size}
        state_files.write_pt(self._start | {"epoch_start": start} | now, self._file(folder))

    def _file(self, folder: Path) -> Path:
        from trainer_hook.loops.loop import rank_file

        return folder / rank_file(self._trainer.args.process_index)

    def _generators(self) -> list[Any]:
        return [generator.get_state() for generator in _generators_of(self._loader)]


def _generators_of(loader: Any) -> list[Any]:
    from trainer_hook.loops.loading import generators

    return generators(loader)


class _Batches:
    """A batch sampler without its ``set_epoch``."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        return iter(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)


def used_batches_skipped() -> contextlib.AbstractContextManager[None]:
    """Have Trainer skip the used batches of an epoch so that the rest and the next epoch are as without a resume."""
    import transformers
    from transformers import trainer as library
    from transformers.trainer_utils import has_length

    original: Any = library.skip_first_batches
    # They ask for as many batches as the whole epoch has, and after the last one a sampler may draw.
    asks_for_more = (4, 49) <= tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 0)

    def skip_first_batches(loader: Any, used: int, *args: Any, **kwargs: Any) -> Any:
        rest = original(loader, used, *args, **kwargs)
        skipping: Any = getattr(rest, "batch_sampler", None)
        # A script's own loader without set_epoch never tells its batch sampler the epoch; the loader that skips would.
        if not hasattr(loader, "set_epoch") and hasattr(getattr(skipping, "batch_sampler", None), "set_epoch"):
            skipping.batch_sampler = _Batches(skipping.batch_sampler)
        if hasattr(loader, "iteration"):
            rest.iteration = loader.iteration  # by which accelerate tells the dataset its epoch; 1.0 forgets it
        return itertools.islice(rest, max(0, len(loader) - used)) if asks_for_more and has_length(loader) else rest

    return replaced(library, "skip_first_batches", skip_first_batches)
