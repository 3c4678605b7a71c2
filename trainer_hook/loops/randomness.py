"""Random number generators, read and set so that a resumed process draws what an uninterrupted one would."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


def read(*, alone: bool = True) -> dict[str, Any]:
    """Return the state of python's, numpy's, torch's and CUDA's global generators. Takes some ten microseconds.

    Args:
        alone: This process uses every visible GPU; else only the current one, because asking another makes a context there.
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all() if alone else [torch.cuda.get_rng_state()]
    return state


def portable(state: dict[str, Any]) -> dict[str, Any]:
    """Return what ``read`` returned as numbers, lists and tensors: ``torch.load`` reads that with ``weights_only=True``."""
    version, numbers, gauss = state["python"]
    portable = state | {"python": [version, list(numbers), gauss]}
    if "numpy" in state:
        kind, keys, position, has_gauss, cached = state["numpy"]
        portable["numpy"] = [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)]
    return portable


def restore(state: dict[str, Any], *, alone: bool = True) -> None:
    """Set the generators to what ``read`` or ``portable`` returned. CUDA's only where there are as many GPUs as then."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        kind, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    cuda = state.get("cuda")
    if cuda and torch.cuda.is_available():
        if not alone:
            torch.cuda.set_rng_state(cuda[0])
        elif len(cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(cuda)


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Leave the global generators as they were, whatever is drawn inside."""
    before = read()
    try:
        yield
    finally:
        restore(before)
