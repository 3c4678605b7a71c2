"""A pass over a data loader that a later process can continue at the same batch.

A loader that has ``state_dict`` and ``load_state_dict`` (torchdata's StatefulDataLoader) saves and restores its own
position. Any other is replayed: the random generators are set to the beginning of the pass, the used batches are fetched and
dropped, and the generators are set to the save. So shuffles, the random numbers of workers and datasets, and a batch that was
prefetched are the same. A sampler that draws from the global generators in the middle of a pass is the exception: it needs a
generator of its own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from trainer_hook.loops import randomness
from trainer_hook.process.log import info
from trainer_hook.process.patching import replaced

REPORT_EVERY_S = 5.0
EPOCH_OF_WORKERS = "from the second pass on the stream has another epoch than in persistent workers of a run from the start"
"""Reason why a resume is not exact."""
LATE_ITERATOR = "accelerate draws for a stateful loader only with its next batch: other random numbers, and another shuffle"
"""Reason why a resume in the middle of a pass is not exact."""
_COUNTERS = ("iteration", "initial_seed")
"""Counters and seeds of accelerate's loaders and samplers."""


class Pass(Iterator[Any]):
    """Iterates over the batches of one pass: from its beginning, or from the ``state`` of an earlier process."""

    def __init__(self, loader: Any, *, all_gpus: bool) -> None:
        """``all_gpus``: as for ``randomness.read``."""
        self._loader = loader
        self._all_gpus = all_gpus
        self._batches: Iterator[Any] = iter(())
        self._undo = contextlib.ExitStack()
        """Until the first batch is fetched, for which the loader makes its workers."""
        self._at: dict[str, dict[str, Any]] = {}
        """State of the generators at the ``start`` of the pass, and before its ``first`` and ``last`` batch was fetched."""
        self._fetched = 0
        self._ahead: list[Any] = []
        """The batch that the process before had fetched and not used: Lightning looks ahead in streams."""

    def __next__(self) -> Any:
        if self._ahead:
            return self._ahead.pop()
        self._at["last"] = randomness.read(all_gpus=self._all_gpus)
        self._at.setdefault("first", self._at["last"])
        with self._undo:
            batch = next(self._batches)
        self._fetched += 1
        return batch

    def begin(self, *, has_workers: bool = False) -> Pass:
        """Begin with the first batch. ``has_workers``: an uninterrupted run has persistent workers from the pass before."""
        has_workers = has_workers or _has_workers(self._loader)
        self._at = {"start": self._read() | {"has_workers": has_workers}}
        self._iterate(has_workers=has_workers)
        return self

    def _iterate(self, *, has_workers: bool) -> None:
        self._undo.close()
        if has_workers and getattr(self._loader, "persistent_workers", False) and not _has_workers(self._loader):
            self._undo.enter_context(unseeded(self._loader))
        self._batches = iter(self._loader)

    def begin_after(self, saved: dict[str, Any]) -> Pass:
        """Begin the pass after one that had ended at ``saved``."""
        with randomness.untouched():
            if saved["loader"] is not None and is_stateful(self._loader):
                # After the state of an ended pass the first iterator is empty; the second one is the new pass.
                self._loader.load_state_dict(saved["loader"])
                iter(_base(self._loader))  # accelerate's makes its iterator later
        self._set_own(saved["now"], mid_pass=False)
        return self.begin(has_workers="start" in saved)

    def resume(self, saved: dict[str, Any], batch: int) -> Pass:
        """Continue with batch number ``batch`` and the generators of ``saved``."""
        self._at = {name: saved[name] for name in ("start", "first", "last")}
        self._restore(saved["start"])
        if saved["loader"] is not None and is_stateful(self._loader):
            self._loader.load_state_dict(saved["loader"])
            batch = 0
            if _base(self._loader) is not self._loader:
                info(f"this resume is not bit-identical: {LATE_ITERATOR} without use_seedable_sampler")
        self._iterate(has_workers=bool(batch and saved["start"].get("has_workers")))
        if batch:
            looked_ahead = saved.get("fetched") == batch + 1
            randomness.restore(saved["first"], all_gpus=self._all_gpus)
            self._drop(batch if looked_ahead else batch - 1)
            # The last one separately: a loader that prefetches draws here for the next batch.
            randomness.restore(saved["last"], all_gpus=self._all_gpus)
            with self._undo:
                last = next(self._batches, self)
            self._ahead = [last] if looked_ahead and last is not self else []
        self._fetched = saved.get("fetched", batch)
        self._restore(saved["now"])
        return self

    def skip(self, batch: int) -> Pass:
        """Begin with batch number ``batch``, without the random state of an earlier process."""
        self.begin()
        self._drop(batch)
        self._fetched = batch
        return self

    def state(self) -> dict[str, Any]:
        """Return this rank's position in the data, and the generators."""
        position = self._loader.state_dict() if is_stateful(self._loader) else None
        at = {name: randomness.portable(state) for name, state in (self._at | {"now": self._read()}).items()}
        return at | {"loader": position, "fetched": self._fetched}

    def _drop(self, count: int) -> None:
        began_s = reported_s = time.monotonic()
        for dropped in range(count):
            with self._undo:
                if next(self._batches, self) is self:
                    return
            if time.monotonic() - reported_s > REPORT_EVERY_S:
                reported_s = time.monotonic()
                info(f"skipping used batches, {dropped + 1} of {count} (torchdata's StatefulDataLoader needs no skipping)")
        if reported_s > began_s:
            info(f"skipped {count} batches in {time.monotonic() - began_s:.1f} s")

    def _read(self) -> dict[str, Any]:
        attributes = (getattr(part, "__dict__", {}) for part in _parts(self._loader))
        counters = [{name: a[name] for name in (*_COUNTERS, "epoch") if type(a.get(name)) is int} for a in attributes]
        own = {"generators": [generator.get_state() for generator in generators(self._loader)], "counters": counters}
        return randomness.read(all_gpus=self._all_gpus) | own

    def _restore(self, state: dict[str, Any]) -> None:
        randomness.restore(state, all_gpus=self._all_gpus)
        self._set_own(state, mid_pass=True)

    def _set_own(self, state: dict[str, Any], *, mid_pass: bool) -> None:
        for generator, saved in zip(generators(self._loader), state.get("generators", ()), strict=False):
            generator.set_state(saved)
        for part, counters in zip(_parts(self._loader), state.get("counters", ()), strict=False):
            for name, value in counters.items():
                # Between passes the script may have set the sampler's epoch already.
                if mid_pass or name in _COUNTERS:
                    setattr(part, name, value)


def _base(loader: Any) -> Any:
    """Return the loader over which accelerate's loaders iterate; of another one itself."""
    return getattr(loader, "base_dataloader", loader)


def _has_workers(loader: Any) -> bool:
    """Whether a loader with persistent workers has made them."""
    return getattr(_base(loader), "_iterator", None) is not None


def unseeded(loader: Any) -> contextlib.AbstractContextManager[None]:
    """Have a loader draw the seed of its new workers elsewhere: workers that persist drew theirs in the first pass."""
    import torch

    return replaced(_base(loader), "generator", torch.Generator())


def outside_pass(*, all_gpus: bool) -> dict[str, Any]:
    """Return the ``Pass.state`` of a rank outside any pass."""
    return {"now": randomness.portable(randomness.read(all_gpus=all_gpus)), "loader": None}


def is_stateful(loader: Any) -> bool:
    """Whether a loader saves its own position in the data."""
    if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
        return False
    return bool(getattr(loader, "use_stateful_dataloader", True))  # accelerate's always has the methods


def has_own_epoch(dataset: Any) -> bool:
    """Whether it is a stream with an epoch that does not reach running workers; those of ``datasets`` share it with them."""
    return hasattr(dataset, "set_epoch") and not hasattr(dataset, "__len__") and not hasattr(dataset, "_ex_iterable")


def _parts(loader: Any) -> list[Any]:
    """Return the loader, the loaders that it combines, and their samplers: each once, in the same order in every process."""
    parts: list[Any] = []
    waiting = [loader]
    while waiting:
        part = waiting.pop(0)
        if part is not None and not any(part is known for known in parts):
            parts.append(part)
            waiting += [getattr(part, name, None) for name in ("sampler", "batch_sampler")]
            waiting += getattr(part, "flattened", ())  # Lightning's CombinedLoader
    return parts


def generators(loader: Any) -> list[Any]:
    """Return the generators of a loader and of its samplers: each once, in the same order in every process."""
    import torch

    found: list[Any] = []
    for part in _parts(loader):
        for name in ("generator", "synchronized_generator"):
            generator = getattr(part, name, None)
            if isinstance(generator, torch.Generator) and not any(generator is known for known in found):
                found.append(generator)
    return found
