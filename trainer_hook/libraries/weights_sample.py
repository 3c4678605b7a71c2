"""A few bytes of a model's weights, by which an evaluation with other weights is seen.

Callbacks that average weights exchange them for an evaluation. A save inside it would take the average for what is trained.
"""

from __future__ import annotations

from typing import Any

import torch

from trainer_hook.loops import state_files


def of(model: Any) -> torch.Tensor | None:
    """Return the first value of each parameter; ``None``: the model is sharded, so its parameters change their form."""
    parameters = [parameter.detach() for parameter in model.parameters() if parameter.numel() and not parameter.is_meta]
    if state_files.is_sharded({"model": model}) or any(hasattr(p, "ds_id") for p in model.parameters()):
        return None
    first = [parameter[(0,) * parameter.ndim].reshape(1).view(torch.uint8) for parameter in parameters]
    devices = {value.device for value in first}
    return torch.cat(first if len(devices) == 1 else [value.cpu() for value in first]).cpu() if first else None


def is_of(model: Any, sample: torch.Tensor | None) -> bool:
    """Whether a model has the weights of a sample that ``of`` returned, as far as it tells."""
    now = None if sample is None else of(model)
    return sample is None or now is None or torch.equal(sample, now)
