"""A pass over a data loader that a later process can continue at the same batch.

A loader that has ``state_dict`` and ``load_state_dict`` (torchdata's StatefulDataLoader) is asked for its place. Any other
is replayed: the generators are set to what they were when the pass began, as many batches as were used are fetched and
dropped, and the generators are set to what they were at the save. So shuffles are the same, and also what workers and
datasets draw, and a batch that the loader had fetched ahead. Only a sampler that draws from the global generators in the
middle of a pass cannot be followed: it needs a generator of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from trainer_hook.loops import randomness
from trainer_hook.process.log import say

LONG_S = 5.0
_COUNTERS = ("iteration", "initial_seed")
"""What accelerate's loaders and samplers count or are seeded with."""


class Pass(Iterator[Any]):
    """One pass over ``loader``: begun, or continued from what ``state`` returned in an earlier process. It yields batches."""

    def __init__(self, loader: Any, *, alone: bool) -> None:
        """``alone``: as for ``randomness.read``."""
        self._loader = loader
        self._alone = alone
        self._batches: Iterator[Any] = iter(())
        self._at: dict[str, dict[str, Any]] = {}
        """The generators when the pass was made, and before the first and before the last batch was fetched."""

    def __next__(self) -> Any:
        self._at["last"] = randomness.read(alone=self._alone)
        self._at.setdefault("first", self._at["last"])
        return next(self._batches)

    def begin(self) -> Pass:
        """Begin with the first batch."""
        self._at = {"start": self._read()}
        self._batches = iter(self._loader)
        return self

    def begin_after(self, saved: dict[str, Any]) -> Pass:
        """Begin the pass that follows one which had ended when ``saved`` was returned."""
        with randomness.untouched():
            if saved["loader"] is not None and is_stateful(self._loader):
                # A loader that is told of a pass that had ended makes two iterators: the first one is not the one that counts.
                self._loader.load_state_dict(saved["loader"])
                iter(self._loader)
        self._set_own(saved["now"], mid_pass=False)
        return self.begin()

    def resume(self, saved: dict[str, Any], batch: int) -> Pass:
        """Continue with batch number ``batch``; the generators are then as they were when ``saved`` was returned."""
        self._at = {name: saved[name] for name in ("start", "first", "last")}
        self._restore(saved["start"])
        if saved["loader"] is not None and is_stateful(self._loader):
            self._loader.load_state_dict(saved["loader"])
            batch = 0
        self._batches = iter(self._loader)
        if batch:
            randomness.restore(saved["first"], alone=self._alone)
            self._drop(batch - 1)
            # The last one on its own: a loader that fetches ahead fetches here what comes next.
            randomness.restore(saved["last"], alone=self._alone)
            next(self._batches, None)
        self._restore(saved["now"])
        return self

    def skip(self, batch: int) -> Pass:
        """Begin with batch number ``batch``, whatever random numbers were drawn for those before."""
        self.begin()
        self._drop(batch)
        return self

    def state(self) -> dict[str, Any]:
        """Return where this rank stands."""
        place = self._loader.state_dict() if is_stateful(self._loader) else None
        at = {name: randomness.portable(state) for name, state in (self._at | {"now": self._read()}).items()}
        return at | {"loader": place}

    def _drop(self, count: int) -> None:
        began_s = told_s = time.monotonic()
        for dropped in range(count):
            if next(self._batches, self) is self:
                return
            if time.monotonic() - told_s > LONG_S:
                told_s = time.monotonic()
                say(f"skipping used batches, {dropped + 1} of {count} (torchdata's StatefulDataLoader needs no skipping)")
        if told_s > began_s:
            say(f"skipped {count} batches in {time.monotonic() - began_s:.1f} s")

    def _read(self) -> dict[str, Any]:
        own = {
            "generators": [generator.get_state() for generator in _generators(self._loader)],
            "counters": [{n: v for n in (*_COUNTERS, "epoch") if type(v := _own(p, n)) is int} for p in _parts(self._loader)],
        }
        return randomness.read(alone=self._alone) | own

    def _restore(self, state: dict[str, Any]) -> None:
        randomness.restore(state, alone=self._alone)
        self._set_own(state, mid_pass=True)

    def _set_own(self, state: dict[str, Any], *, mid_pass: bool) -> None:
        for generator, saved in zip(_generators(self._loader), state.get("generators", ()), strict=False):
            generator.set_state(saved)
        for part, counters in zip(_parts(self._loader), state.get("counters", ()), strict=False):
            for name, value in counters.items():
                # Between passes the script may have set the sampler's epoch already.
                if mid_pass or name in _COUNTERS:
                    setattr(part, name, value)


def nowhere(*, alone: bool) -> dict[str, Any]:
    """Return the state of a rank that is in no pass."""
    return {"now": randomness.portable(randomness.read(alone=alone)), "loader": None}


def is_stateful(loader: Any) -> bool:
    """Whether a loader keeps its own place in the data."""
    if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
        return False
    return bool(getattr(loader, "use_stateful_dataloader", True))  # accelerate's has the methods, with or without a state


def _parts(loader: Any) -> list[Any]:
    """Return the loader, those that it combines, and their samplers, each once, in the same order in every process."""
    parts: list[Any] = []
    waiting = [loader]
    while waiting:
        part = waiting.pop(0)
        if part is not None and not any(part is known for known in parts):
            parts.append(part)
            waiting += [getattr(part, name, None) for name in ("sampler", "batch_sampler")]
            waiting += getattr(part, "flattened", ())  # Lightning's CombinedLoader
    return parts


def _generators(loader: Any) -> list[Any]:
    import torch

    found: list[Any] = []
    for part in _parts(loader):
        for name in ("generator", "synchronized_generator"):
            generator = getattr(part, name, None)
            if isinstance(generator, torch.Generator) and not any(generator is known for known in found):
                found.append(generator)
    return found


def _own(part: Any, name: str) -> Any:
    return vars(part).get(name) if hasattr(part, "__dict__") else None
