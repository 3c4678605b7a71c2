"""A few bytes of a model's weights, by which an evaluation with other weights is seen.

Callbacks that average weights exchange them for an evaluation. A save inside it would take the average for what is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainer_hook.loops import state_files


class WeightsSample:
    """The first value of each parameter when an evaluation begins."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._values = _first_values(model)
        self._is_same: bool | None = None

    def is_same(self, agree: Callable[[bool], bool]) -> bool:
        """Whether the models of all ranks still have these weights, as far as the sample tells; looked up once. Collective.

        ``agree``: as ``RankConsensus.all_agree``.
        """
        if self._is_same is None:
            now = None if self._values is None else _first_values(self._model)
            self._is_same = agree(self._values is None or now is None or torch.equal(self._values, now))
        return self._is_same


def _first_values(model: Any) -> torch.Tensor | None:
    """Return them; ``None``: the model is sharded, so its parameters change their form, or they cannot be taken one by one."""
    parameters = [parameter.detach() for parameter in model.parameters() if parameter.numel() and not parameter.is_meta]
    if state_files.is_sharded({"model": model}) or any(hasattr(p, "ds_id") for p in model.parameters()):
        return None
    try:
        first = [parameter[(0,) * parameter.ndim].reshape(1).view(torch.uint8) for parameter in parameters]
    except Exception:  # a subclass of tensors, such as a quantized one, may have no such operation
        return None
    devices = {value.device for value in first}
    return torch.cat(first if len(devices) == 1 else [value.cpu() for value in first]).cpu() if first else None
