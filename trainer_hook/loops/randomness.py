"""State of the random number generators: a resumed process draws the same numbers as an uninterrupted one."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


def read(*, all_gpus: bool = True) -> dict[str, Any]:
    """Return the state of python's, numpy's, torch's and CUDA's global generators, in about ten microseconds.

    ``all_gpus``: of every visible GPU; else only of the current one, because reading another one makes a context there.
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all() if all_gpus else [torch.cuda.get_rng_state()]
    return state


def portable(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state of ``read`` as numbers, lists and tensors, which ``torch.load`` reads with ``weights_only=True``."""
    version, numbers, gauss = state["python"]
    portable = state | {"python": [version, list(numbers), gauss]}
    if "numpy" in state:
        kind, keys, position, has_gauss, cached = state["numpy"]
        portable["numpy"] = [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)]
    return portable


def restore(state: dict[str, Any], *, all_gpus: bool = True) -> None:
    """Set the generators to a state of ``read`` or ``portable``; those of CUDA only with the same number of GPUs."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        kind, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    cuda = state.get("cuda")
    if cuda and torch.cuda.is_available():
        if not all_gpus:
            torch.cuda.set_rng_state(cuda[0])
        elif len(cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(cuda)


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Restore the global generators on exit."""
    before = read()
    try:
        yield
    finally:
        restore(before)
