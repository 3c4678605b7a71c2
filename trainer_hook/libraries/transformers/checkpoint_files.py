"""Files of a Trainer's checkpoint: what one lacks, what its state says, how large the first one will be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer_hook.contract import ContractError
from trainer_hook.contract.typed_json import integer, json_object, number, typed

STATE = "trainer_state.json"
META_STOPPED_EARLY = "stopped_early"
"""Key in ``meta``: a callback ended training at this step, before the last one."""
_WHOLE = r"(model|pytorch_model|adapter_model)(-\d+-of-\d+)?\.(safetensors|bin)"
_FSDP = r"pytorch_model_fsdp\.bin|[^/]*pytorch_model_fsdp[^/]*/.+"
WEIGHTS = re.compile(f"(.+/)?{_WHOLE}|{_FSDP}")
"""Weights by the names that the libraries give them, also of modules in folders of their own."""
WEIGHTS_OF_TRAINER = re.compile(rf"{_WHOLE}|[^/]+/adapter_model\.(safetensors|bin)|{_FSDP}")
"""Weights where Trainer's own ``_load_from_checkpoint`` looks for them."""
_OPTIMIZER = re.compile(r"optimizer\.(pt|bin)|[^/]*optimizer[^/]*/.+")
_DEEPSPEED = re.compile(r"global_step[^/]*/.+")
"""DeepSpeed keeps weights and optimizer there."""


def missing_from(
    files: Mapping[str, int],
    *,
    rank: int,
    world_size: int,
    saved_world_size: int | None,
    weights: re.Pattern[str] | None = WEIGHTS,
) -> list[str]:
    """Return what a checkpoint lacks for one rank. Other arguments as of ``Driver.missing_files``.

    Trainer itself loads the files that are there: without ``optimizer.pt`` or ``scheduler.pt`` it silently begins both anew.
    ``weights``: the paths of the weights that are loaded; ``None``: unknown.
    """
    sharded = any(map(_DEEPSPEED.fullmatch, files))
    missing = [] if STATE in files else [STATE]
    if not sharded and weights is not None and not any(map(weights.fullmatch, files)):
        missing.append("the model's weights")
    if not sharded and not any(map(_OPTIMIZER.fullmatch, files)):
        missing.append("optimizer.pt")
    if "scheduler.pt" not in files and not sharded:
        missing.append("scheduler.pt")
    rng = "rng_state.pth" if world_size == 1 else f"rng_state_{rank}.pth"
    if rng not in files and saved_world_size in (None, world_size):
        missing.append(rng)
    return missing


def is_finished(state: Mapping[str, Any], meta: Mapping[str, Any], *, max_steps: int, epochs: float) -> bool:
    """Whether training ends at ``state``. Trainer itself would train one more step.

    ``state``: content of ``trainer_state.json``. ``meta``: of the marker. ``max_steps`` 0 or less: ``epochs`` is the limit.
    """
    if meta.get(META_STOPPED_EARLY):
        return True
    if max_steps > 0:
        return bool(state.get("global_step", 0) >= max_steps)
    return bool((state.get("epoch") or 0.0) >= epochs - 1e-6)


def read_state(folder: Path) -> dict[str, Any]:
    """Return ``trainer_state.json`` of a checkpoint, or an empty one: it is not there, or malformed."""
    try:
        return parse_state((folder / STATE).read_bytes())
    except (OSError, ContractError):
        return {}


def parse_state(raw: bytes) -> dict[str, Any]:
    """Return the content of ``trainer_state.json``.

    Raises ``ContractError``: Trainer could not load it, or its position is not a number.
    """
    try:
        state = json_object(raw, what=STATE)
        integer(state, "global_step")
        for name in ("max_steps", "num_train_epochs", "epoch"):
            number(state, name)
        for name, kind in (("log_history", list), ("stateful_callbacks", dict), ("best_model_checkpoint", str)):
            typed(state, name, kind)
        if not all(isinstance(entry, dict) for entry in state.get("log_history") or ()):
            raise ContractError("log_history must hold objects")
    except ContractError as error:
        raise ContractError(f"{STATE}: {error}") from None
    return state


def state_bytes(trainer: Any) -> int:
    """Return the estimated size of a Trainer's first checkpoint on this node: weights and optimizer state.

    State that DeepSpeed or an unknown kind of model or optimizer holds is not counted: the first save is then tried.
    """
    try:
        tensors = [*trainer.model.parameters(), *trainer.model.buffers()]
        if hasattr(trainer.model, "peft_config"):  # only the adapter is saved
            tensors = [tensor for tensor in tensors if tensor.requires_grad]
        states = (getattr(trainer.optimizer, "state", None) or {}).values()
        tensors += [value for state in states for value in state.values() if hasattr(value, "element_size")]
        own = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)  # this rank's shard of a DTensor
        return sum(int(tensor.numel() * tensor.element_size()) for tensor in own)
    except Exception:
        return 0
